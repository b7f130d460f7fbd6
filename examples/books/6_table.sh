#!/usr/bin/env bash
# Our numbers beside the paper's.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'none' 'none' 'a moment'

# row LABEL VALID PAPER TEST PAPER
row() {
    LC_ALL=C printf '%-34s %9.2f %9s %9.2f %9s\n' "$@"
}

printf '\n%-34s %19s %19s\n%-34s %9s %9s %9s %9s\n' Books valid test '' ours paper ours paper
row 'LM of books' "$(perplexity books-base-valid)" 14.75 "$(perplexity books-base-test)" 11.89
row '  + kNN, books' "$(tuned_perplexity books-tune)" 14.20 "$(perplexity books-test)" 10.89
if [ -n "$WIKI_CHECKPOINT" ]; then
    row 'LM of another domain' "$(perplexity wiki-base-valid)" 37.13 "$(perplexity wiki-base-test)" 34.84
    row '  + kNN, books' "$(tuned_perplexity wiki-tune)" 24.85 "$(perplexity wiki-test)" 20.47
fi
echo "(valid is what was tuned on. The paper: 0.7B tokens of books, an LM of 3B tokens of Wikipedia, byte-pair"
echo "encoding; other books, other tokens, another vocabulary, so compare the differences and not the numbers)"
