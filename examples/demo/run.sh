#!/usr/bin/env bash
# A kNN-LM of Python's own documentation, from text to nearest neighbours, with the commands that a user would type.
# Results and logs go to demo/. Run again, it continues after the last finished step; delete demo/ to start over.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -d .venv/bin ]; then
    PATH="$PWD/.venv/bin:$PATH"
fi
mkdir -p demo/logs
echo "Some minutes on 2 cores, most of it training. The full output of each step is in demo/logs."

# show COMMAND...: print a command in lines of moderate length, ready to be copied
show() {
    local line='$' word
    for word in "$@"; do
        if [[ $word == *[!A-Za-z0-9_./=,-]* ]]; then
            word="'$word'"
        fi
        if [[ $word == --* ]] && ((${#line} > 90)); then
            printf '%s \\\n' "$line"
            line='   '
        fi
        line+=" $word"
    done
    printf '%s\n' "$line"
}

# step NAME COMMAND...: show a command and run it, unless it has succeeded before. The whole output goes to a log, the
# lines that matter to the screen.
step() {
    local name=$1 log=demo/logs/$1.log
    shift
    if [ -e "demo/logs/$name.done" ]; then
        printf '[%s] done before, see %s\n' "$name" "$log"
        return
    fi
    printf '\n[%s]\n' "$name"
    show "$@"
    if ! "$@" 2>&1 | tee "$log" | sed -n -E "$lines_that_matter"; then
        printf '\n[%s] failed; the end of %s says why:\n\n' "$name" "$log" >&2
        tail -n 3 "$log" | cut -c 1-300 >&2
        exit 1
    fi
    touch "demo/logs/$name.done"
}
# fairseq logs as "time | INFO | name | message" or as "INFO:name:message", depending on the command.
lines_that_matter='
    s/^[-0-9:, ]+\| INFO \| [A-Za-z0-9_.]+ \| //
    s/^INFO:[A-Za-z0-9_.]+://
    /^(train|valid|test): /p
    s/^\[None\] (.* replaced .*)$/\1/p
    s/^(epoch [0-9]+ \| valid .*loss [0-9.]+ \| ppl [0-9.]+).*$/\1/p
    /^ +tokens +LM|^ *valid, |^--knn-/p
    /^(dumping |saving |.* is complete|index |Evaluated |Loss \(base 2\): [0-9]|kNN-LM: )/p'

# fairseq takes it for granted that there is a GPU.
common=(--seed 1)
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    common+=(--cpu)
fi

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
    --no-epoch-checkpoints "${common[@]}"

# --- memory ----------------------------------------------------------------------------------------------------------

# fairseq subtracts --context-window from --tokens-per-sample: blocks of 128 tokens, each with the 128 before it.
context=(--sample-break-mode none --tokens-per-sample 256 --context-window 128 --max-tokens 2048)
model=(--path demo/checkpoints/checkpoint_best.pt "${context[@]}" "${common[@]}")
knn=(--user-dir fairseq_knnlm --task knn_language_modeling)

step dump fairseq-eval-lm demo/bin --gen-subset train "${model[@]}" "${knn[@]}" \
    --knn-dump demo/datastore --knn-index auto

# --- scores ----------------------------------------------------------------------------------------------------------

# The valid split is scored once and kept; lambda, temperature and the cache are then tuned on it in seconds.
step save fairseq-eval-lm demo/bin --gen-subset valid "${model[@]}" "${knn[@]}" \
    --knn-datastore demo/datastore --knn-cache-size 1000 --knn-save demo/valid
step tune-knn knnlm tune demo/valid --without cache
step tune-cache knnlm tune demo/valid --without knn0
step tune-both knnlm tune demo/valid

# tuned NAME: the flags that a tuning step printed
tuned() {
    grep -m 1 '^--knn-' "demo/logs/tune-$1.log"
}

score=(fairseq-eval-lm demo/bin --gen-subset test "${model[@]}")
datastore=(--knn-datastore demo/datastore)
# shellcheck disable=SC2046  # flags without blanks inside
{
    step score-base "${score[@]}" --output-word-probs
    step score-knn "${score[@]}" "${knn[@]}" "${datastore[@]}" $(tuned knn)
    step score-all "${score[@]}" "${knn[@]}" "${datastore[@]}" $(tuned knn) --knn-k all
    step score-cache "${score[@]}" "${knn[@]}" $(tuned cache)
    step score-both "${score[@]}" "${knn[@]}" "${datastore[@]}" $(tuned both) --knn-k all
}

# --- neighbours ------------------------------------------------------------------------------------------------------

# The keys of the test split are the queries.
step queries fairseq-eval-lm demo/bin --gen-subset test "${model[@]}" "${knn[@]}" --knn-dump demo/queries
step neighbors python examples/demo/neighbors.py --datastore demo/datastore --queries demo/queries \
    --dictionary demo/bin/dict.txt --lm-log demo/logs/score-base.log \
    --temperature "$(tuned knn | sed -E 's/.*--knn-temperature ([^ ]+).*/\1/')" \
    --output demo/neighbors.txt

# --- results ---------------------------------------------------------------------------------------------------------

# row LABEL STEP: what fairseq-eval-lm reported at the end of its log
row() {
    local log=demo/logs/$2.log perplexity speed
    perplexity=$(sed -n -E 's/^.*Perplexity: ([0-9.]+).*$/\1/p' "$log" | tail -n 1)
    speed=$(sed -n -E 's/^.*\(([0-9.]+) tokens\/s\).*$/\1/p' "$log" | tail -n 1)
    LC_ALL=C printf '%-22s %11.2f %12.0f\n' "$1" "$perplexity" "$speed"
}

printf '\n%-22s %11s %12s\n' 'test split' perplexity tokens/s
row 'base LM' score-base
row '+ kNN (k = 1024)' score-knn
row '+ kNN (k = all)' score-all
row '+ cache' score-cache
row '+ kNN + cache' score-both
printf '\n'
cat demo/neighbors.txt
