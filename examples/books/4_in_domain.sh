#!/usr/bin/env bash
# Table 2: the LM of the books with a datastore of the same books.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'for each million tokens 1 GB (SIZE=small) or 4 GB (SIZE=paper), index included' "the index's and 2 GB" \
    'a forward pass over twice the tokens of train, then one over valid and test with the search'

memorise_and_score books "$WORK/bin" "$WORK/checkpoints/checkpoint_best.pt"
echo
beside 'LM of books, test' "$(perplexity books-base-test)" 11.89
beside '  + kNN, test' "$(perplexity books-test)" 10.89
