# shellcheck shell=bash disable=SC2034,SC2054  # the numbered scripts use these; cutoffs have commas
# Settings of the SPALM recipe; every script reads them. All can be set in the environment.
#
#   TEXT      a folder with tokenised train.txt and valid.txt
#   WORK      where everything goes (default: spalm)
#   DICT      a dict.txt to use (default: made from train.txt)
#   LAYERS, DIM, FFN, HEADS, CUTOFFS   of all three models (CUTOFFS=: no adaptive softmax)
#   UPDATES, LANES, SEGMENT            how long each is trained: so many updates of LANES x SEGMENT tokens
#   MEMORY, TEST_MEMORY                states that Transformer-XL and SPALM remember, in training and in scoring
#   K         neighbours that SPALM reads
#   WINDOW    a token of train reads none from so near (default: what the Transformer sees at once)
#   MOST_K, K_VALUES, LOOK_AT, ROUNDS  of the analysis: neighbours of valid, numbers to read, tokens, timings
#   OUT       where the page, JSON and plots go (default: WORK/results)
#   SMALL     anything: toy models, for a small text, in minutes
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${WORK:=spalm}" "${DICT:=}" "${SMALL:=}" "${OUT:=$WORK/results}"
if [ -n "$SMALL" ]; then
    : "${LAYERS:=2}" "${DIM:=32}" "${FFN:=64}" "${HEADS:=2}" "${CUTOFFS=50,120}" "${UPDATES:=60}" "${LANES:=8}"
    : "${SEGMENT:=32}" "${MEMORY:=32}" "${TEST_MEMORY:=64}" "${WARM_UP:=6}" "${LR:=0.01}" "${MOST_K:=4}"
    : "${WINDOW:=32}" "${K_VALUES:=1,2,4}" "${LOOK_AT:=500}" "${ROUNDS:=2}"
fi
: "${LAYERS:=2}" "${DIM:=128}" "${FFN:=512}" "${HEADS:=4}" "${CUTOFFS=2000,10000}" "${UPDATES:=600}" "${LANES:=8}"
: "${SEGMENT:=128}" "${MEMORY:=128}" "${TEST_MEMORY:=256}" "${K:=4}" "${WARM_UP:=50}" "${LR:=0.003}"
: "${WINDOW:=$((2 * SEGMENT))}" "${MOST_K:=16}" "${K_VALUES:=1,2,4,8,16}" "${LOOK_AT:=50000}" "${ROUNDS:=20}"
logs=$WORK/logs
# shellcheck source=examples/lib.sh
source examples/lib.sh

bin=$WORK/bin
# Transformer: as many tokens in training as a segment and its memory; in scoring at least half of them before each.
context_length=$((2 * SEGMENT))
transformer_context=("${any_break[@]}" --tokens-per-sample "$context_length" --context-window "$SEGMENT" --max-tokens 4096)
schedule=(
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$LR" --lr-scheduler polynomial_decay
    --warmup-updates "$WARM_UP" --max-update "$UPDATES" --total-num-update "$UPDATES" --dropout 0.1 --seed 1
    --validate-interval 1000 --no-epoch-checkpoints --log-interval 50 # validation at the end alone
)
transformer=(
    --task language_modeling --arch transformer_lm --decoder-normalize-before --decoder-layers "$LAYERS"
    --decoder-embed-dim "$DIM" --decoder-input-dim "$DIM" --decoder-output-dim "$DIM"
    --decoder-ffn-embed-dim "$FFN" --decoder-attention-heads "$HEADS" "${any_break[@]}"
    --tokens-per-sample "$context_length" --max-tokens $((LANES * SEGMENT))
)
recurrent=(
    --user-dir fairseq_knnlm --task spalm --layers "$LAYERS" --dim "$DIM" --ffn-dim "$FFN" --heads "$HEADS"
    --tokens-per-sample "$SEGMENT" --batch-size "$LANES" --memory-size "$MEMORY"
)
if [ -n "$CUTOFFS" ]; then
    criterion=(--criterion adaptive_loss --ddp-backend legacy_ddp)
    transformer+=(
        --adaptive-input --tie-adaptive-weights --tie-adaptive-proj --adaptive-input-cutoff "$CUTOFFS"
        --adaptive-softmax-cutoff "$CUTOFFS" --adaptive-input-factor 4 --adaptive-softmax-factor 4
    )
    recurrent+=(--adaptive-cutoff "$CUTOFFS" --adaptive-factor 4)
else
    criterion=(--criterion cross_entropy)
    transformer+=(--share-decoder-input-output-embed)
fi
