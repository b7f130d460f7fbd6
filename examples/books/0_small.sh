#!/usr/bin/env bash
# Only for SMALL without BOOKS: books, and an LM of another domain, made of what is on every machine with Python.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ -z "$made" ]; then
    echo "[small] not needed"
    exit
fi
expect 'nothing, this is for SMALL' 'nothing' 'nothing'
step small-text python examples/books/small.py "$made"
step small-binarise fairseq-preprocess --only-source --workers "$(nproc)" --destdir "$made/bin" --thresholdsrc 3 \
    --trainpref "$made/other/train.txt" --validpref "$made/other/valid.txt"
step small-train fairseq-train "$made/bin" --task language_modeling --save-dir "$made/lm" --seed 1 "${training[@]}" \
    "${device[@]}"
