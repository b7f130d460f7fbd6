#!/usr/bin/env bash
# The index. Says what it needs, and how long, before it starts; resumes.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect "7 GB with 4-bit codes or the paper's index; 213 GB where auto keeps the keys whole, because memory has room" \
    'as much; 10 GB to build' "hours; two on a CPU for the paper's, without training it"

knnlm build "$datastore" --index "$INDEX"
first_factory='import json, sys; print((json.load(sys.stdin)["indexes"] or [{"factory": "none"}])[0]["factory"])'
factory=$(knnlm info "$datastore" --json | python -c "$first_factory")
beside 'index' "$factory" IVF4096,PQ64
