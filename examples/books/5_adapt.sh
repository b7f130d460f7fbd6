#!/usr/bin/env bash
# Table 4: an LM of another domain, adapted by a datastore of the books and nothing else.    disk and time as before
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ -z "$WIKI_CHECKPOINT" ]; then
    echo "[adapt] skipped: no WIKI_CHECKPOINT"
    exit
fi
memorise_and_score wiki "$WORK/bin-wiki" "$WIKI_CHECKPOINT"
