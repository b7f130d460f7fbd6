#!/usr/bin/env bash
# Memorise the training split.  disk 212 GB (103,227,021 keys of 1,024 half-precision numbers); a forward pass over
#                               twice its tokens. Interrupted, it resumes. To split it over processes that share the
#                               disk: PARTS=8 PART=0 ./5_dump.sh, and so on to PART=7.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

fairseq-eval-lm "$bin" --gen-subset train --path "$checkpoint" "${dump_context[@]}" "${knn[@]}" "${device[@]}" \
    --knn-dump "$datastore" --num-shards "${PARTS:-1}" --shard-id "${PART:-0}" --no-progress-bar
