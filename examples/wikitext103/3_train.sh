#!/usr/bin/env bash
# The base LM: trained here, or CHECKPOINT, which must have been trained with this very dictionary.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '9 GB of checkpoints; 1 to 3 GB for a given one' '32 GB on each GPU' 'days on 8 GPUs; none for a given checkpoint'

mkdir -p "$WORK/checkpoints"
if [ -n "${CHECKPOINT:-}" ]; then
    ln -sf "$(realpath "$CHECKPOINT")" "$checkpoint"
    echo "[train] using $CHECKPOINT"
    exit
fi
# Killed, fairseq continues from its last checkpoint when this is run again.
step train fairseq-train "$bin" --task language_modeling --save-dir "$WORK/checkpoints" --seed 1 \
    "${training[@]}" "${device[@]}"
beside 'parameters' "$(parameters train)" 247M
