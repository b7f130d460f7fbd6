# shellcheck shell=bash disable=SC2034  # the numbered scripts use these
# Settings of the WikiText-103 recipe; every script reads them. All can be set in the environment.
#
#   WORK        where everything goes (default: wikitext103)
#   DATA        a folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, instead of a download
#   CHECKPOINT  a trained LM, instead of training one
#   INDEX       auto (default), paper, or any FAISS factory string
#   KEY_DIM     dimensions of the stored keys (default: 256 of 1,024); KEY_DTYPE int8 (default), float16 or float32.
#               The paper's own keys: KEY_DIM=1024 KEY_DTYPE=float16, 212 GB
#   SMALL       anything: a toy model and short contexts, for a small text of the same form in DATA, or without DATA
#               for Python's own documentation; minutes, into wikitext103-small
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${SMALL:=}" "${WORK:=wikitext103${SMALL:+-small}}" "${INDEX:=auto}"
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh

text=$WORK/text
bin=$WORK/bin
checkpoint=$WORK/checkpoints/checkpoint_best.pt
datastore=$WORK/datastore

# fairseq 0.12 takes --context-window from --tokens-per-sample, so the latter includes the context.
# Scoring: blocks of 512 tokens, each after 2,560 others, as in the paper. Dumping: blocks of 1,536 after 1,536 others,
# so that every key has seen at least that many tokens (but at the very beginning of the corpus) and none is dropped.
if [ -n "$SMALL" ]; then
    training_flags toy
    score_context=("${any_break[@]}" --tokens-per-sample 96 --context-window 80 --max-tokens 768)
    dump_context=("${any_break[@]}" --tokens-per-sample 96 --context-window 48 --max-tokens 768)
    cache_size=200
    : "${KEY_DIM:=32}"
else
    training_flags paper
    score_context=("${any_break[@]}" --tokens-per-sample 3072 --context-window 2560 --max-tokens 3072)
    dump_context=("${any_break[@]}" --tokens-per-sample 3072 --context-window 1536 --max-tokens 3072)
    cache_size=3000
    : "${KEY_DIM:=256}"
fi
: "${KEY_DTYPE:=int8}"
