#!/usr/bin/env bash
# The LM of the books.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '0.2 GB (SIZE=small), 9 GB (SIZE=paper)' '3 GB; 32 GB on each GPU' 'hours on a CPU; days on 8 GPUs'

# Killed, fairseq continues from its last checkpoint when this is run again.
step train fairseq-train "$WORK/bin" --task language_modeling --save-dir "$WORK/checkpoints" --seed 1 \
    "${training[@]}" "${device[@]}"
beside 'parameters' "$(parameters train)" 247M
