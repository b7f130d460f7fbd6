#!/usr/bin/env bash
# A pre-trained LM of Hugging Face with memories: LM, + kNN, + cache, + both, in two domains; the datastores are all that
# is adapted. Run again, it continues after the last finished step, and a dump inside of one.
#
#   MODEL        a folder with config.json, tokenizer.json and *.safetensors
#   GGUF         a GGUF file in MODEL instead of these three (default: none)
#   TEXT, OTHER  folders with train.txt and valid.txt, a domain each
#   NAMES        what the table calls the two (default: "Wikipedia novels")
#   DETOKENISE   anything: the texts are tokenised by Moses rules, undo that
#   WORDS        of each datastore (default: 110000); WORDS_SCORED of each valid, half of them for tuning (default: 16000)
#   CONTEXT      tokens that a token at least sees before it (default: 128); BLOCK, scored after them (default: 384)
#   CACHE        positions of the continuous cache (default: 2000)
#   WORK         where everything goes (default: hugging-face); OUT, where the page goes (default: WORK/results)
#   ABOUT        a sentence about model, texts and machine, for the page
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${MODEL:?give it a folder with a model of Hugging Face}" "${TEXT:?give it a folder with train.txt and valid.txt}"
: "${OTHER:?give it a folder with train.txt and valid.txt of another domain}"
: "${GGUF:=}" "${NAMES:=Wikipedia novels}" "${DETOKENISE:=}" "${WORDS:=110000}" "${WORDS_SCORED:=16000}"
: "${CONTEXT:=128}" "${BLOCK:=384}" "${CACHE:=2000}" "${WORK:=hugging-face}" "${ABOUT:=}"
: "${OUT:=$WORK/results}"
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh
echo "A model of 135M parameters reads 250 to 500 tokens per second and core, so about an hour on one at the default sizes."

# NAME -> the folder of its text
declare -A folders=([text]=$TEXT [other]=$OTHER)

for name in text other; do
    for split in train valid; do
        words=$WORDS pieces=20
        if [ $split = valid ]; then
            words=$WORDS_SCORED pieces=2 # what is tuned on and what is reported lie far apart
        fi
        step "$name-$split" python examples/hugging_face/text.py "${folders[$name]}/$split.txt" \
            "$WORK/$name/$split.txt" --words "$words" --pieces "$pieces" ${DETOKENISE:+--detokenise}
    done
    step "$name-prepare" knnlm hf prepare "$MODEL" ${GGUF:+--gguf "$GGUF"} --trainpref "$WORK/$name/train.txt" \
        --validpref "$WORK/$name/valid.txt" --destdir "$WORK/$name/bin"
done

# eval_lm STEP NAME SPLIT FLAGS...
eval_lm() {
    local title=$1 data=$WORK/$2/bin split=$3
    shift 3
    step "$title" fairseq-eval-lm "$data" --path "$data/checkpoint.pt" --gen-subset "$split" "${any_break[@]}" \
        --tokens-per-sample "$((BLOCK + CONTEXT))" --context-window "$CONTEXT" "${knn[@]}" "${device[@]}" "$@"
}

for name in text other; do
    eval_lm "$name-dump" $name train --knn-dump "$WORK/datastore-$name" --knn-index auto
done

# Each half of valid with the datastore of its own domain and the cache; the novels once more with the other datastore.
for run in text-text other-other other-text; do
    for half in 0 1; do
        eval_lm "$run-$half" "${run%-*}" valid --knn-datastore "$WORK/datastore-${run#*-}" --knn-cache-size "$CACHE" \
            --num-shards 2 --shard-id $half --knn-save "$WORK/saves/$run-$half"
    done
done

# shellcheck disable=SC2086  # two names
python examples/hugging_face/page.py "$WORK" --out "$OUT" --names $NAMES --about "$ABOUT"
