#!/usr/bin/env bash
# The LM alone.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'none' "the model's, 3 GB" 'a forward pass over 2.8M tokens: minutes on a GPU, hours on a CPU'

for split in valid test; do
    step "base-$split" fairseq-eval-lm "$bin" --gen-subset "$split" --path "$checkpoint" "${score_context[@]}" \
        "${knn[@]}" "${device[@]}"
done
echo
beside 'base LM, valid' "$(perplexity base-valid)" 17.96
beside 'base LM, test' "$(perplexity base-test)" 18.65
