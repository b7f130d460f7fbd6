#!/usr/bin/env bash
# Table 3 and Figure 2: both LMs alone, and the little one with each datastore. Lambda and temperature are tuned on the
# first half of valid; all numbers are of the second.
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

score=(fairseq-eval-lm "$WORK/bin-large" --gen-subset valid --num-shards 2 "${context[@]}" "${knn[@]}" "${device[@]}")
step base-little "${score[@]}" --shard-id 1 --path "$little"
step base-large "${score[@]}" --shard-id 1 --path "$large"
for fraction in "${fractions[@]}"; do
    for half in 0 1; do
        step "save-$fraction-$half" "${score[@]}" --shard-id "$half" --path "$little" \
            --knn-datastore "$WORK/datastore-$fraction" --knn-save "$WORK/saves/$fraction-$half"
    done
    step "tune-$fraction" knnlm tune "$WORK/saves/$fraction-0" --report "$WORK/saves/$fraction-1" --json
done
python examples/scaling/table.py "$WORK" "$(perplexity base-little)" "$(perplexity base-large)" "${fractions[@]}"
