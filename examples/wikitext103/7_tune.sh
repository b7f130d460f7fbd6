#!/usr/bin/env bash
# Score valid once, keep it, tune.   disk 1.8 GB (neighbours and cache of 217,646 tokens); memory: the index's and 2 GB
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

step save-valid fairseq-eval-lm "$bin" --gen-subset valid --path "$checkpoint" "${score_context[@]}" "${knn[@]}" \
    "${device[@]}" --knn-datastore "$datastore" --knn-index "$INDEX" --knn-cache-size "$cache_size" \
    --knn-save "$WORK/saves/valid"
step tune-knn knnlm tune "$WORK/saves/valid" --without cache
step tune-cache knnlm tune "$WORK/saves/valid" --without knn0
step tune-both knnlm tune "$WORK/saves/valid"
