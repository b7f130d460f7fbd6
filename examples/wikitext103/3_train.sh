#!/usr/bin/env bash
# The base LM, 247M parameters. disk 9 GB of checkpoints; days on 8 GPUs, so take a trained one if you can:
#                               CHECKPOINT=file (trained with this very dictionary; no time, 1 to 3 GB)
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

mkdir -p "$WORK/checkpoints"
if [ -n "${CHECKPOINT:-}" ]; then
    ln -sf "$(realpath "$CHECKPOINT")" "$checkpoint"
    echo "[train] using $CHECKPOINT"
else
    # Killed, fairseq continues from its last checkpoint when this is run again.
    step train fairseq-train "$bin" --task language_modeling --save-dir "$WORK/checkpoints" --seed 1 \
        "${training[@]}" "${device[@]}"
fi
