#!/usr/bin/env bash
# Binarise.                     disk 0.4 GB; minutes
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

step binarise fairseq-preprocess --only-source --destdir "$bin" --workers "$(nproc)" \
    --trainpref "$text/train.txt" --validpref "$text/valid.txt" --testpref "$text/test.txt"
