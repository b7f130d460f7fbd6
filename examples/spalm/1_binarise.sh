#!/usr/bin/env bash
# Binarise the text.
# shellcheck source=examples/spalm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

: "${TEXT:?give it a folder with train.txt and valid.txt: TEXT=folder $0}"
dictionary=()
if [ -n "$DICT" ]; then
    dictionary=(--srcdict "$DICT")
fi
step binarise fairseq-preprocess --only-source --workers "$(nproc)" --destdir "$bin" --trainpref "$TEXT/train.txt" \
    --validpref "$TEXT/valid.txt" "${dictionary[@]}"
