#!/usr/bin/env bash
# The LM alone.                 memory: the model's; a forward pass over 6 times the tokens of valid and test
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

for split in valid test; do
    step "base-$split" fairseq-eval-lm "$bin" --gen-subset "$split" --path "$checkpoint" "${score_context[@]}" \
        "${knn[@]}" "${device[@]}"
done
printf '\nbase LM: valid %s (paper 17.96), test %s (paper 18.65)\n' "$(perplexity base-valid)" "$(perplexity base-test)"
