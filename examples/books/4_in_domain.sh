#!/usr/bin/env bash
# Table 2: the LM of the books with a datastore of the same books.
# disk: for each million tokens 1 GB (SIZE=small) or 4 GB (SIZE=paper), index included; a forward pass over twice the
# tokens of train, then one over valid and test with the search
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

memorise_and_score books "$WORK/bin" "$WORK/checkpoints/checkpoint_best.pt"
