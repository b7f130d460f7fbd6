#!/usr/bin/env bash
# Get and check the text.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '0.8 GB' 'little' 'minutes, most of it the download'

address=https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip
sha1=0aec09a7537b58d4bb65362fee27650eeaba625a # as GluonNLP has it
declare -A expected=([train]=103227021 [valid]=217646 [test]=245569)

if [ -e "$text/checked" ]; then
    echo "[data] done before, in $text"
    cat "$text/checked"
    exit
fi
mkdir -p "$text"
if [ -z "${DATA:-}" ] && [ -n "$SMALL" ]; then
    DATA=$text/python
    step text python examples/demo/corpus.py "$DATA"
    for split in train valid test; do
        mv "$DATA/$split.txt" "$DATA/wiki.$split.tokens"
    done
elif [ -z "${DATA:-}" ]; then
    echo "downloading $address"
    if ! curl --fail --location --output "$text/wikitext-103-v1.zip" "$address"; then
        echo "error: the download failed; get WikiText-103 elsewhere and run: DATA=folder $0" >&2
        exit 1
    fi
    if ! echo "$sha1  $text/wikitext-103-v1.zip" | sha1sum --check --quiet; then
        echo "error: $text/wikitext-103-v1.zip is not the file that was published; remove it and run $0 again" >&2
        exit 1
    fi
    python -m zipfile -e "$text/wikitext-103-v1.zip" "$text"
    DATA=$text/wikitext-103
fi
for split in train valid test; do
    file=$DATA/wiki.$split.tokens
    if [ ! -e "$file" ]; then
        echo "error: there is no $file; give DATA a folder with wiki.{train,valid,test}.tokens" >&2
        exit 1
    fi
    tokens=$(count_tokens "$file")
    if [ -z "$SMALL" ] && [ "$tokens" != "${expected[$split]}" ]; then
        echo "error: $file has $tokens tokens with the ends of lines and should have ${expected[$split]}; get the" \
            "word-level WikiText-103 (not the raw one)" >&2
        exit 1
    fi
    ln -sf "$(realpath "$file")" "$text/$split.txt"
    beside "tokens with the ends of lines, $split" "$tokens" "${expected[$split]}"
done | tee "$text/counts"
mv "$text/counts" "$text/checked"
