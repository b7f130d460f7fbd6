#!/usr/bin/env bash
# The Transformer: a row of the table, and the frozen LM that makes keys and neighbours.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

# Killed, fairseq continues from its last checkpoint when this is run again.
step train-transformer fairseq-train "$bin" --save-dir "$WORK/transformer" "${transformer[@]}" "${criterion[@]}" \
    "${schedule[@]}" "${device[@]}" --no-progress-bar
