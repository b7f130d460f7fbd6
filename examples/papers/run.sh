#!/usr/bin/env bash
# Measures everything that docs/results.md shows and writes the JSON files: docs/results.json, docs/results/*.json.
#
#   TEXT        a folder with tokenised train.txt and valid.txt
#   OTHER       another, of another domain
#   WORK        where the LMs, datastores and saves go
#   CHECKPOINT  an LM of TEXT that reads 256 tokens or more, for all but the pages scaling and domains
#   DICT        its dict.txt
#   ABOUT       a sentence about text, LM and machine, for the top of docs/results.md
#   LITTLE, UPDATES   see lms.sh
#
# What is there in WORK is not done again. The numbers of docs/results.json are kept too: delete it to measure them anew.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${TEXT:?give it a folder with train.txt and valid.txt}" "${OTHER:?give it a folder of another domain}"
: "${WORK:?give it a folder for LMs, datastores and saves}" "${CHECKPOINT:?give it an LM of TEXT}"
: "${DICT:?give it the dict.txt of CHECKPOINT}" "${ABOUT:=}"
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh

here=$(count_tokens "$TEXT/train.txt") there=$(count_tokens "$OTHER/train.txt")
# With 256 dimensions. TEXT: the datastore with two indexes, parts of it with theirs, and those of an LM with 128
# dimensions. OTHER: a datastore with 256 and two with 128 dimensions, and their indexes.
expect "about $(((33 * here + 21 * there) / 10000000 + 1)) GB for the $here and $there tokens (256 dimensions)" \
    "as much as the largest datastore, for speed; 4 GB at least" \
    "many hours on 2 cores for 10M tokens (three trainings, ten passes over train; never timed as a whole)"

examples/papers/lms.sh
python -m benchmarks.results --data "$WORK/all" --path "$CHECKPOINT" --work "$WORK" --about "$ABOUT"

# page NAME DATA CHECKPOINT OPTIONS...
page() {
    local name=$1 data=$2 checkpoint=$3
    shift 3
    python "examples/papers/$name.py" "$data" "$checkpoint" "$WORK" --out docs/results "$@"
}
tiny=(--tokens-per-sample 128 --context-window 32 --parts 8)
page memories "$WORK/all" "$CHECKPOINT"
page gate "$WORK/all" "$CHECKPOINT"
page scaling "$WORK/all" "$WORK/all/lm/checkpoint_best.pt" --little "$WORK/little/lm/checkpoint_best.pt" "${tiny[@]}"
page domains "$WORK/other" "$WORK/other/lm/checkpoint_best.pt" --foreign "$WORK/all/lm/checkpoint_best.pt" "${tiny[@]}"
page mixtures "$WORK/all" "$CHECKPOINT"
page keys "$WORK/little" "$CHECKPOINT" --context-window 32
page scores "$WORK/all" "$CHECKPOINT" --parts 40
page curves "$WORK/all" "$CHECKPOINT" --parts 20 --other "$WORK/other"
page heads "$WORK/all" "$CHECKPOINT"
page far_field "$WORK/all" "$CHECKPOINT" --other "$WORK/other"
page compact "$WORK/all" "$CHECKPOINT"
page pruning "$WORK/all" "$CHECKPOINT"
page where "$WORK/all" "$CHECKPOINT" --save "$WORK/saves/auto"
page places "$WORK/all" "$CHECKPOINT" --save "$WORK/saves/auto"
page sparsified "$WORK/all" "$CHECKPOINT" --datastore "$WORK/datastore"
for name in ensembles soft_labels; do
    python "examples/papers/$name.py" "$WORK/all" "$WORK" --out docs/results
done
python examples/papers/overfitting.py "$WORK/all" "$WORK" --tokens 100000 --out docs/results
python -m benchmarks.results --report
