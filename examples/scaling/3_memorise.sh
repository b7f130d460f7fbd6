#!/usr/bin/env bash
# The little LM reads everything once, without training; then random parts of that datastore.
# disk: for each million tokens of train 2 GB (SIZE=small), parts and indexes included; a forward pass over twice them
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

step dump fairseq-eval-lm "$WORK/bin-large" --gen-subset train --path "$little" "${context[@]}" "${knn[@]}" \
    "${device[@]}" --knn-dump "$WORK/datastore-1"
for fraction in "${fractions[@]}"; do
    if [ "$fraction" != 1 ]; then
        step "subsample-$fraction" knnlm subsample "$WORK/datastore-1" --fraction "$fraction" \
            -o "$WORK/datastore-$fraction"
    fi
    step "index-$fraction" knnlm build "$WORK/datastore-$fraction"
done
