#!/usr/bin/env bash
# A kNN-LM of Python's own documentation, from text to nearest neighbours, with the commands that a user would type.
# Results and logs go to demo/. Run again, it continues after the last finished step; delete demo/ to start over.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
logs=demo/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh
echo "Some minutes on 2 cores, most of it training. The full output of each step is in demo/logs."
steps=$(grep -c '^ *step ' "${BASH_SOURCE[0]}")
common=(--seed 1 "${device[@]}")

# --- text ------------------------------------------------------------------------------------------------------------

step corpus python examples/demo/corpus.py demo/text

step preprocess fairseq-preprocess --only-source --destdir demo/bin --thresholdsrc 2 \
    --trainpref demo/text/train.txt --validpref demo/text/valid.txt --testpref demo/text/test.txt

# --- language model --------------------------------------------------------------------------------------------------

# A small adaptive-input Transformer, the kind of model that the kNN-LM paper starts from. adaptive_loss needs
# legacy_ddp; a pre-norm decoder (--decoder-normalize-before) is what keys can be taken from.
step train fairseq-train demo/bin --save-dir demo/checkpoints --task language_modeling --arch transformer_lm \
    --decoder-layers 4 --decoder-attention-heads 4 --decoder-ffn-embed-dim 512 \
    --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256 --decoder-normalize-before \
    --adaptive-input --adaptive-input-cutoff 2000 --adaptive-input-factor 4 \
    --adaptive-softmax-cutoff 2000 --adaptive-softmax-factor 4 --tie-adaptive-weights --tie-adaptive-proj \
    --criterion adaptive_loss --ddp-backend legacy_ddp --dropout 0.1 \
    --sample-break-mode none --tokens-per-sample 256 --max-tokens 1024 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update 1000 --max-update 1000 \
    --no-epoch-checkpoints --log-interval 50 "${common[@]}"

# --- memory ----------------------------------------------------------------------------------------------------------

# fairseq subtracts --context-window from --tokens-per-sample: blocks of 128 tokens, each with the 128 before it.
context=(--sample-break-mode none --tokens-per-sample 256 --context-window 128 --max-tokens 2048)
model=(--path demo/checkpoints/checkpoint_best.pt "${context[@]}" "${common[@]}")

step dump fairseq-eval-lm demo/bin --gen-subset train "${model[@]}" "${knn[@]}" \
    --knn-dump demo/datastore --knn-index auto

# --- scores ----------------------------------------------------------------------------------------------------------

score=(fairseq-eval-lm demo/bin --gen-subset test "${model[@]}")
datastore=(--knn-datastore demo/datastore)
step score-base "${score[@]}" --output-word-probs
# Nothing is tuned yet: the temperature is at the scale of the datastore's own distances.
step score-first "${score[@]}" "${knn[@]}" "${datastore[@]}"

# The valid split is scored once and kept; lambda, temperature and the cache are then tuned on it in seconds. What is
# kept in the datastore (--keep) is what every later command uses that is given no such flags.
step save fairseq-eval-lm demo/bin --gen-subset valid "${model[@]}" "${knn[@]}" \
    --knn-datastore demo/datastore --knn-cache-size 1000 --knn-save demo/valid
step tune-knn knnlm tune demo/valid --without cache --keep
step tune-cache knnlm tune demo/valid --without knn0
step tune-both knnlm tune demo/valid --keep

# shellcheck disable=SC2046  # flags without blanks inside
{
    step score-knn "${score[@]}" "${knn[@]}" "${datastore[@]}"
    step score-number "${score[@]}" "${knn[@]}" "${datastore[@]}" $(tuned tune-knn) --knn-k 1024
    step score-cache "${score[@]}" "${knn[@]}" $(tuned tune-cache)
    step score-both "${score[@]}" "${knn[@]}" "${datastore[@]}" \
        $(tuned tune-both | grep -o -E -e '--knn-cache-size [0-9]+')
}

# --- neighbours ------------------------------------------------------------------------------------------------------

# The keys of the test split are the queries.
step queries fairseq-eval-lm demo/bin --gen-subset test "${model[@]}" "${knn[@]}" --knn-dump demo/queries
step neighbors python examples/demo/neighbors.py --datastore demo/datastore --queries demo/queries \
    --dictionary demo/bin/dict.txt --lm-log demo/logs/score-base.log \
    --temperature "$(tuned tune-knn | sed -E 's/.*--knn-temperature ([^ ]+).*/\1/')" \
    --output demo/neighbors.txt

# --- results ---------------------------------------------------------------------------------------------------------

# row LABEL STEP
row() {
    LC_ALL=C printf '%-22s %11.2f %12.0f\n' "$1" "$(perplexity "$2")" "$(speed "$2")"
}

printf '\n%-22s %11s %12s\n' 'test split' perplexity tokens/s
row 'base LM' score-base
row '+ kNN, nothing tuned' score-first
row '+ kNN' score-knn
row '+ kNN, k = 1024' score-number
row '+ cache' score-cache
row '+ kNN + cache' score-both
printf '\n'
cat demo/neighbors.txt
