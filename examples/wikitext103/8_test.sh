#!/usr/bin/env bash
# Score test with the tuned flags, and the table.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'none' "the index's and 5 GB" 'three forward passes over 1.5M tokens, two searches for 245,569'

score=(fairseq-eval-lm "$bin" --gen-subset test --path "$checkpoint" "${score_context[@]}" "${knn[@]}" "${device[@]}")
store=(--knn-datastore "$datastore" --knn-preset paper --knn-index "$INDEX")
# shellcheck disable=SC2046  # flags without blanks inside
{
    step test-knn "${score[@]}" "${store[@]}" $(tuned tune-knn)
    step test-cache "${score[@]}" $(tuned tune-cache)
    step test-both "${score[@]}" "${store[@]}" $(tuned tune-both)
}

# row LABEL VALID PAPER TEST PAPER
row() {
    LC_ALL=C printf '%-16s %9.2f %9s %9.2f %9s\n' "$@"
}

printf '\n%-16s %19s %19s\n%-16s %9s %9s %9s %9s\n' WikiText-103 valid test '' ours paper ours paper
row 'base LM' "$(perplexity base-valid)" 17.96 "$(perplexity base-test)" 18.65
row '+ kNN' "$(tuned_perplexity tune-knn)" 16.06 "$(perplexity test-knn)" 16.12
row '+ cache' "$(tuned_perplexity tune-cache)" 17.67 "$(perplexity test-cache)" 18.27
row '+ kNN + cache' "$(tuned_perplexity tune-both)" 15.81 "$(perplexity test-both)" 15.79
if [ -n "$SMALL" ]; then
    echo "(SMALL: another text and a toy model, so the paper's numbers are here for their place in the table only)"
fi
