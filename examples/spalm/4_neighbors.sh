#!/usr/bin/env bash
# The Transformer memorises train and finds the nearest of its contexts for every token of train and valid. Interrupted,
# it resumes. To split the search over processes that share the disk: PARTS=8 PART=0 ./4_neighbors.sh, and so on.
# disk: for each token a key of 2 x DIM bytes, the same in the index, and 16 bytes for each neighbour
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

for split in train valid; do
    step "dump-$split" fairseq-eval-lm "$bin" --gen-subset "$split" --path "$WORK/transformer/checkpoint_last.pt" \
        "${transformer_context[@]}" "${knn[@]}" "${device[@]}" --knn-dump "$WORK/keys-$split"
done
step index knnlm build "$WORK/keys-train"
for split in train valid; do
    # The analysis reads more of valid's than the network was trained with.
    flags=(--k "$MOST_K")
    if [ "$split" = train ]; then
        flags=(--k "$K" --window "$WINDOW")
    fi
    step "neighbors-$split${PART:-}" knnlm neighbors --datastore "$WORK/keys-train" --queries "$WORK/keys-$split" \
        "${flags[@]}" --num-shards "${PARTS:-1}" --shard-id "${PART:-0}" -o "$WORK/neighbors/$split"
    tail -n 2 "$logs/neighbors-$split${PART:-}.log"
done
