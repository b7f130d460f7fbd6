#!/usr/bin/env bash
# Score valid once, keep it, tune.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '1.8 GB (neighbours and cache of 217,646 tokens)' "the model's and 3 GB" \
    'a forward pass over 1.3M tokens and a search for 217,646; 25 minutes in the paper'

step save-valid fairseq-eval-lm "$bin" --gen-subset valid --path "$checkpoint" "${score_context[@]}" "${knn[@]}" \
    "${device[@]}" --knn-datastore "$datastore" --knn-preset paper --knn-index "$INDEX" \
    --knn-cache-size "$cache_size" --knn-save "$WORK/saves/valid"
step tune-knn knnlm tune "$WORK/saves/valid" --without cache
step tune-cache knnlm tune "$WORK/saves/valid" --without knn0
step tune-both knnlm tune "$WORK/saves/valid"
echo
beside '+ kNN, valid, tuned on it' "$(tuned_perplexity tune-knn)" 16.06
beside '+ cache, valid, tuned on it' "$(tuned_perplexity tune-cache)" 17.67
beside '+ kNN + cache, valid, tuned on it' "$(tuned_perplexity tune-both)" 15.81
beside 'lambda' "$(tuned tune-knn | sed -E 's/.*--knn-lambda ([^ ]+).*/\1/')" 0.25
