# shellcheck shell=bash disable=SC2034  # the numbered scripts use these
# Settings of the Books recipe; every script reads them. All can be set in the environment.
#
#   BOOKS            a folder of plain-text books, one file each, *.txt
#   WORK             where everything goes (default: books)
#   HELD_OUT         how many whole books go to valid, and as many to test (default: 2)
#   BPE              number of merges for byte-pair encoding (default: none, words)
#   SIZE             of the LM to train: small (default) or paper; see examples/lib.sh
#   WIKI_CHECKPOINT  an LM of another domain, to be adapted by a datastore of the books
#   WIKI_DICT        its dict.txt
#   SMALL            anything: a toy model and one held-out book, for a small folder of books; without BOOKS, for books
#                    and an LM of another domain that it makes of Python's own documentation; minutes, into books-small
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${SMALL:=}" "${WORK:=books${SMALL:+-small}}" "${SIZE:=small}" "${BPE:=}" "${HELD_OUT:=2}"
: "${BOOKS:=}" "${WIKI_CHECKPOINT:=}" "${WIKI_DICT:=}"
made=
if [ -n "$SMALL" ]; then
    SIZE=toy HELD_OUT=1
    if [ -z "$BOOKS" ]; then
        made=$WORK/python
        BOOKS=$made/books WIKI_CHECKPOINT=$made/lm/checkpoint_best.pt WIKI_DICT=$made/bin/dict.txt
    fi
fi
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh
training_flags "$SIZE"

text=$WORK/text
kind=words
if [ -n "$BPE" ]; then
    kind=bpe
fi

# eval_lm NAME SPLIT DATA CHECKPOINT FLAGS...: a step with fairseq-eval-lm under our task
eval_lm() {
    local name=$1 split=$2 data=$3 checkpoint=$4
    shift 4
    step "$name" fairseq-eval-lm "$data" --gen-subset "$split" --path "$checkpoint" "${context[@]}" "${knn[@]}" \
        "${device[@]}" "$@"
}

# memorise_and_score NAME DATA CHECKPOINT: LM alone, datastore of its training split, tuning on valid, score of test
memorise_and_score() {
    local name=$1 data=$2 checkpoint=$3
    eval_lm "$name-base-valid" valid "$data" "$checkpoint"
    eval_lm "$name-base-test" test "$data" "$checkpoint"
    eval_lm "$name-dump" train "$data" "$checkpoint" --knn-dump "$WORK/datastore-$name" --knn-index auto
    eval_lm "$name-save" valid "$data" "$checkpoint" --knn-datastore "$WORK/datastore-$name" \
        --knn-preset paper --knn-index auto --knn-save "$WORK/saves/$name"
    step "$name-tune" knnlm tune "$WORK/saves/$name"
    # shellcheck disable=SC2046  # flags without blanks inside
    eval_lm "$name-test" test "$data" "$checkpoint" --knn-datastore "$WORK/datastore-$name" --knn-preset paper \
        --knn-index auto $(tuned "$name-tune")
}
