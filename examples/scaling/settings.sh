# shellcheck shell=bash disable=SC2034  # the numbered scripts use these
# Settings of the scaling recipe; every script reads them. All can be set in the environment.
#
#   TEXT              a folder with tokenised train.txt and valid.txt
#   WORK              where everything goes (default: scaling)
#   LITTLE            how many lines of train.txt the small LM is trained on (default: the first quarter)
#   SIZE              of the LMs: small (default) or paper; see examples/lib.sh
#   LARGE_CHECKPOINT  an LM trained on all of train.txt, instead of training one
#   DICT              its dict.txt
#   SMALL             anything: toy models, for a small text in TEXT, or without TEXT for Python's own documentation;
#                     minutes, into scaling-small
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${SMALL:=}" "${WORK:=scaling${SMALL:+-small}}" "${SIZE:=small}" "${TEXT:=}" "${LITTLE:=}" "${LARGE_CHECKPOINT:=}"
: "${DICT:=}"
fractions=0.1,0.25,0.5,1
if [ -n "$SMALL" ]; then
    SIZE=toy
    fractions=0.25,1
fi
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh
training_flags "$SIZE"
little=$WORK/checkpoints-little/checkpoint_best.pt
large=${LARGE_CHECKPOINT:-$WORK/checkpoints-large/checkpoint_best.pt}
