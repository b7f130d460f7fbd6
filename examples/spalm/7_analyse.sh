#!/usr/bin/env bash
# What SPALM does with its memory, the throughput of training, and the page with everything.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

half=$(($(count_tokens "$TEXT/valid.txt") / 2)) # about where the half begins that is reported
reading=(
    --path "$WORK/spalm/checkpoint_last.pt" --data "$bin" --neighbors "$WORK/neighbors" --tokens-per-sample "$SEGMENT"
    --memory-size "$TEST_MEMORY" --from "$half" --tokens "$LOOK_AT" -o "$WORK/analysis"
)
step gates knnlm spalm gates "${reading[@]}"
step k knnlm spalm k "${reading[@]}" --values "$K_VALUES"
step neighbours knnlm spalm neighbors "$WORK/neighbors/valid" --data "$bin" --datastore "$WORK/keys-train" \
    --from "$half" --tokens 40 -o "$WORK/analysis"
step gains knnlm spalm gains "$WORK/saves/spalm" "$WORK/saves/xl" "$WORK/saves/transformer" --data "$bin" \
    -o "$WORK/analysis"
step throughput python -m benchmarks.spalm --layers "$LAYERS" --dim "$DIM" --ffn-dim "$FFN" --heads "$HEADS" \
    --cutoffs "$CUTOFFS" --lanes "$LANES" --segment "$SEGMENT" --memory "$MEMORY" --neighbors "$K" \
    --vocabulary "$(wc -l <"$bin/dict.txt")" --rounds "$ROUNDS"
python examples/spalm/page.py "$WORK" "$OUT"
