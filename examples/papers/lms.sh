#!/usr/bin/env bash
# The LMs that scaling.py and domains.py compare: one of the first part of a text, one of all of it, one of another text.
# All have the same dictionary, architecture, number of updates and seed.
#
#   TEXT     a folder with tokenised train.txt and valid.txt
#   OTHER    another, of another domain
#   WORK     where everything goes
#   LITTLE   how many lines of TEXT/train.txt the first LM is trained on (default: a quarter)
#   DICT     the dictionary (default: one made of TEXT/train.txt)
#   SIZE     of the LMs (default: tiny, minutes each on one core); see examples/lib.sh
#   UPDATES  how long to train; batches are of 2,048 tokens
#
# disk 0.2 GB besides three times the text; memory 2 GB. What is done is skipped.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${TEXT:?give it a folder with train.txt and valid.txt}" "${OTHER:?give it a folder of another domain}"
: "${WORK:?give it a folder for the LMs}" "${SIZE:=tiny}" "${DICT:=}"
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh
training_flags "$SIZE"

# binarise NAME TRAIN VALID [DICT]
binarise() {
    step "binarise-$1" fairseq-preprocess --only-source --workers "$(nproc)" --destdir "$WORK/$1" \
        --trainpref "$2" --validpref "$3" ${4:+--srcdict "$4"}
}

mkdir -p "$WORK/little"
if [ ! -e "$WORK/little/train.txt" ]; then
    head -n "${LITTLE:-$(($(wc -l <"$TEXT/train.txt") / 4))}" "$TEXT/train.txt" >"$WORK/little/part.txt"
    mv "$WORK/little/part.txt" "$WORK/little/train.txt"
fi
binarise all "$TEXT/train.txt" "$TEXT/valid.txt" "$DICT"
binarise little "$WORK/little/train.txt" "$TEXT/valid.txt" "$WORK/all/dict.txt"
binarise other "$OTHER/train.txt" "$OTHER/valid.txt" "$WORK/all/dict.txt"
for name in little all other; do
    step "train-$name" fairseq-train "$WORK/$name" --task language_modeling --seed 1 --save-dir "$WORK/$name/lm" \
        "${training[@]}" "${device[@]}"
done
