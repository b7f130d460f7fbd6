#!/usr/bin/env bash
# Binarise all of the text and its first part, with one dictionary.
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'twice the text' '2 GB' 'minutes for 100M tokens'

if [ -z "$TEXT" ] && [ -n "$SMALL" ]; then
    TEXT=$WORK/text/python
    step text python examples/demo/corpus.py "$TEXT"
fi
: "${TEXT:?give it a folder with train.txt and valid.txt: TEXT=folder $0}"
mkdir -p "$WORK/text"
lines=${LITTLE:-$(($(wc -l <"$TEXT/train.txt") / 4))}
if [ ! -e "$WORK/text/little.txt" ]; then
    head -n "$lines" "$TEXT/train.txt" >"$WORK/text/little.part"
    mv "$WORK/text/little.part" "$WORK/text/little.txt"
fi
dictionary=()
if [ -n "$DICT" ]; then
    dictionary=(--srcdict "$DICT")
fi
step binarise-large fairseq-preprocess --only-source --workers "$(nproc)" --destdir "$WORK/bin-large" \
    --trainpref "$TEXT/train.txt" --validpref "$TEXT/valid.txt" "${dictionary[@]}"
step binarise-little fairseq-preprocess --only-source --workers "$(nproc)" --destdir "$WORK/bin-little" \
    --trainpref "$WORK/text/little.txt" --validpref "$TEXT/valid.txt" --srcdict "$WORK/bin-large/dict.txt"
beside 'tokens of the first part' "$(count_tokens "$WORK/text/little.txt")" 100M
beside 'tokens of everything' "$(count_tokens "$TEXT/train.txt")" 3B
