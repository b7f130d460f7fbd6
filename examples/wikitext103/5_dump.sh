#!/usr/bin/env bash
# Memorise the training split. Interrupted, it resumes. To split it over processes that share the disk:
# PARTS=8 PART=0 ./5_dump.sh, and so on to PART=7.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect '27 GB (103,227,021 keys of 256 numbers of 8 bits, of 1,024 in the model)' "the model's, 3 GB" \
    'a forward pass over 206M tokens: hours on a GPU'

if grep -q '"complete": true' "$datastore/manifest.json" 2>/dev/null; then
    echo "[dump] done before, in $datastore"
else
    fairseq-eval-lm "$bin" --gen-subset train --path "$checkpoint" "${dump_context[@]}" "${knn[@]}" "${device[@]}" \
        --knn-dump "$datastore" --knn-key-dim "$KEY_DIM" --knn-key-dtype "$KEY_DTYPE" \
        --num-shards "${PARTS:-1}" --shard-id "${PART:-0}" --no-progress-bar
fi
beside 'entries' "$(entries "$datastore")" 103,225,485
echo "(the paper's code leaves out the first 1,536 of the 103,227,021 tokens)"
