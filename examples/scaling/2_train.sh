#!/usr/bin/env bash
# One LM on the first part, one on everything, with the same number of updates.
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '0.2 GB (SIZE=small), 9 GB (SIZE=paper) for each LM' '3 GB; 32 GB on each GPU' \
    'for each LM hours on a CPU (SIZE=small) or days on 8 GPUs (SIZE=paper)'

# Killed, fairseq continues from its last checkpoint when this is run again.
sizes=(little large)
if [ -n "$LARGE_CHECKPOINT" ]; then
    sizes=(little)
fi
for size in "${sizes[@]}"; do
    step "train-$size" fairseq-train "$WORK/bin-$size" --task language_modeling --seed 1 \
        --save-dir "$WORK/checkpoints-$size" "${training[@]}" "${device[@]}"
done
beside 'parameters' "$(parameters train-little)" 247M
