#!/usr/bin/env bash
# Get the text and write it as characters.   disk 0.5 GB; minutes, most of it the download
# shellcheck source=examples/enwik8/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ -e "$TEXT/test.txt" ]; then
    echo "[text] done before, in $TEXT"
    exit
fi
mkdir -p "$TEXT"
if [ -z "$ENWIK8" ]; then
    if ! curl --fail --location --output "$TEXT/enwik8.zip" http://mattmahoney.net/dc/enwik8.zip; then
        echo "error: the download failed; get enwik8 elsewhere and run: ENWIK8=file $0" >&2
        exit 1
    fi
    python -m zipfile -e "$TEXT/enwik8.zip" "$TEXT"
    ENWIK8=$TEXT/enwik8
fi
bytes=$(wc -c <"$ENWIK8")
held_out=5000000
if [ -n "$SMALL" ]; then
    held_out=$((bytes / 10))
elif [ "$bytes" != 100000000 ]; then
    echo "error: $ENWIK8 has $bytes bytes, enwik8 100000000; give another file, or SMALL=1 for any text" >&2
    exit 1
fi
python examples/enwik8/characters.py "$ENWIK8" "$TEXT" --valid "$held_out" --test "$held_out"
