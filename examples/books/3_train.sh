#!/usr/bin/env bash
# The LM of the books.      SIZE=small: hours on a CPU, 0.2 GB of disk; SIZE=paper: days on 8 GPUs, 9 GB
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

# Killed, fairseq continues from its last checkpoint when this is run again.
step train fairseq-train "$WORK/bin" --task language_modeling --save-dir "$WORK/checkpoints" --seed 1 \
    "${training[@]}" "${device[@]}"
