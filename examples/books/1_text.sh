#!/usr/bin/env bash
# Tokenise, hold whole books out; with BPE, learn and apply merges.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'twice the text, three times with BPE' '1 GB' 'about a minute for 10 MB of text'

: "${BOOKS:?give it a folder of plain-text books: BOOKS=folder $0}"
step text python examples/books/tokenise.py "$BOOKS" "$text/words" --held-out "$HELD_OUT"
if [ -n "$BPE" ]; then
    if ! python -c 'import subword_nmt' 2>/dev/null; then
        echo "error: BPE needs subword-nmt; run: pip install subword-nmt" >&2
        exit 1
    fi
    mkdir -p "$text/bpe"
    step bpe-learn subword-nmt learn-bpe --symbols "$BPE" --input "$text/words/train.txt" --output "$text/bpe/codes"
    for split in train valid test; do
        step "bpe-$split" subword-nmt apply-bpe --codes "$text/bpe/codes" --input "$text/words/$split.txt" \
            --output "$text/bpe/$split.txt"
    done
fi
beside 'tokens of train with the ends of lines' "$(count_tokens "$text/$kind/train.txt")" 0.7B
