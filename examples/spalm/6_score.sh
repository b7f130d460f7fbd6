#!/usr/bin/env bash
# Valid in two halves: what there is to tune is tuned on the first and reported on the second.
# Transformer-XL and SPALM memorise train too, for their own kNN-LMs.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

memory=(--model-overrides "{'memory_size': $TEST_MEMORY}")
remembering=(--user-dir fairseq_knnlm --task spalm --tokens-per-sample "$SEGMENT" "${device[@]}" "${memory[@]}")
# evaluate NAME MODEL SPLIT FLAGS...: a step with fairseq-eval-lm
evaluate() {
    local name=$1 model=$2 split=$3 flags
    shift 3
    case $model in
        transformer) flags=("${transformer_context[@]}" "${knn[@]}" "${device[@]}") ;;
        xl) flags=("${remembering[@]}") ;;
        spalm) flags=("${remembering[@]}" --neighbors "$WORK/neighbors") ;;
    esac
    step "$name" fairseq-eval-lm "$bin" --gen-subset "$split" --path "$WORK/$model/checkpoint_last.pt" "${flags[@]}" "$@"
}

for model in transformer xl spalm; do
    evaluate "score-$model" "$model" valid --num-shards 2 --shard-id 1 --knn-save "$WORK/saves/$model"
done
for model in xl spalm; do
    evaluate "keys-$model" "$model" train --knn-dump "$WORK/keys-$model"
    for half in 0 1; do
        evaluate "knn-$model-$half" "$model" valid --num-shards 2 --shard-id "$half" \
            --knn-datastore "$WORK/keys-$model" --knn-save "$WORK/saves/knn-$model-$half"
    done
    step "tune-$model" knnlm tune "$WORK/saves/knn-$model-0" --report "$WORK/saves/knn-$model-1" --json
done
