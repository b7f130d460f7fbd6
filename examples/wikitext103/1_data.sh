#!/usr/bin/env bash
# Get and check the text.       disk 0.8 GB; minutes, most of it the download
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

address=https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip
sha1=0aec09a7537b58d4bb65362fee27650eeaba625a # as GluonNLP has it
declare -A expected=([train]=103227021 [valid]=217646 [test]=245569)

if [ -e "$text/checked" ]; then
    echo "[data] done before, in $text"
    exit
fi
mkdir -p "$text"
if [ -z "${DATA:-}" ]; then
    echo "downloading $address"
    if ! curl --fail --location --output "$text/wikitext-103-v1.zip" "$address"; then
        echo "error: the download failed; get WikiText-103 elsewhere and run: DATA=folder $0" >&2
        exit 1
    fi
    echo "$sha1  $text/wikitext-103-v1.zip" | sha1sum --check --quiet
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
    printf '%s: %d tokens with the ends of lines\n' "$split" "$tokens"
    if [ -z "$SMALL" ] && [ "$tokens" != "${expected[$split]}" ]; then
        echo "error: $file should have ${expected[$split]}; get the word-level WikiText-103 (not the raw one)" >&2
        exit 1
    fi
    ln -sf "$(realpath "$file")" "$text/$split.txt"
done
touch "$text/checked"
