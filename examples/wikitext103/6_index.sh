#!/usr/bin/env bash
# The index. Says what it needs, and how long, before it starts; resumes.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect "28 GB, and 29 GB more while it is built; 7 GB for the paper's" '2 GB' \
    "half an hour on two cores; two hours for the paper's, without training it"

knnlm build "$datastore" --index "$INDEX"
first_factory='import json, sys; print((json.load(sys.stdin)["indexes"] or [{"factory": "none"}])[0]["factory"])'
factory=$(knnlm info "$datastore" --json | python -c "$first_factory")
beside 'index' "$factory" IVF4096,PQ64
