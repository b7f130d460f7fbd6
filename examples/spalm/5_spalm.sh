#!/usr/bin/env bash
# SPALM: the Transformer-XL that reads the retrieved tokens through a gate, trained from scratch.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

step train-spalm fairseq-train "$bin" --save-dir "$WORK/spalm" --arch spalm_lm --neighbors "$WORK/neighbors" \
    --neighbors-used "$K" "${recurrent[@]}" "${criterion[@]}" "${schedule[@]}" "${device[@]}" --no-progress-bar
