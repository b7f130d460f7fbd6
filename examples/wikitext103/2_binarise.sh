#!/usr/bin/env bash
# Binarise.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '0.4 GB' '2 GB' 'minutes'

step binarise fairseq-preprocess --only-source --destdir "$bin" --workers "$(nproc)" \
    --trainpref "$text/train.txt" --validpref "$text/valid.txt" --testpref "$text/test.txt"
beside 'types in the dictionary' "$(wc -l <"$bin/dict.txt")" 'about 250K'
