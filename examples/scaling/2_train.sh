#!/usr/bin/env bash
# One LM on the first part, one on everything, with the same number of updates.
# SIZE=small: hours on a CPU each; SIZE=paper: days on 8 GPUs each
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

# Killed, fairseq continues from its last checkpoint when this is run again.
sizes=(little large)
if [ -n "$LARGE_CHECKPOINT" ]; then
    sizes=(little)
fi
for size in "${sizes[@]}"; do
    step "train-$size" fairseq-train "$WORK/bin-$size" --task language_modeling --seed 1 \
        --save-dir "$WORK/checkpoints-$size" "${training[@]}" "${device[@]}"
done
