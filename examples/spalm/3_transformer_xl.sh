#!/usr/bin/env bash
# The Transformer-XL: the same layers, with the states of the segment before.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

step train-xl fairseq-train "$bin" --save-dir "$WORK/xl" --arch transformer_xl_lm "${recurrent[@]}" "${criterion[@]}" \
    "${schedule[@]}" "${device[@]}" --no-progress-bar
