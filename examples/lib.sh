# shellcheck shell=bash disable=SC2034,SC2054  # the recipes use the variables; cutoffs have commas
# What the recipes share. A recipe sets `logs` (a folder) and sources this file from the project's folder.

if [ -d .venv/bin ]; then
    PATH="$PWD/.venv/bin:$PATH"
fi
: "${logs:?set it to a folder}"
mkdir -p "$logs"

# fairseq takes it for granted that there is a GPU.
device=()
if [ ! -e /dev/nvidiactl ]; then
    device=(--cpu)
fi
knn=(--user-dir fairseq_knnlm --task knn_language_modeling)

any_break=(--sample-break-mode none) # blocks may end inside a line

# training_flags SIZE: an adaptive-input Transformer LM, as flags of fairseq-train in `training`; and in `context` what
# fairseq-eval-lm should score it with. fairseq 0.12 takes --context-window from --tokens-per-sample, and --max-tokens
# counts blocks without their context.
#   toy     minutes, for trying a recipe out
#   tiny    1.2M parameters, minutes on one CPU core; the LMs that are trained for docs/results.md
#   small   7M parameters, hours on a CPU
#   paper   247M parameters: Baevski and Auli (2019), for 8 GPUs of 32 GB; on fewer, raise --update-freq accordingly
training_flags() {
    local small=(
        --arch transformer_lm --decoder-normalize-before --adaptive-input --tie-adaptive-weights --tie-adaptive-proj
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --dropout 0.1 --lr-scheduler polynomial_decay
        --no-epoch-checkpoints
    )
    training=(--criterion adaptive_loss --ddp-backend legacy_ddp "${any_break[@]}")
    case $1 in
        toy)
            training+=(
                "${small[@]}" --decoder-layers 2 --decoder-attention-heads 2 --decoder-ffn-embed-dim 128
                --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64
                --adaptive-input-cutoff 50,120 --adaptive-softmax-cutoff 50,120
                --adaptive-input-factor 2 --adaptive-softmax-factor 2
                --max-update 80 --total-num-update 80 --warmup-updates 8 --lr 0.005 --tokens-per-sample 96
                --max-tokens 1536
            )
            tokens_per_sample=96 context_window=48 scored_at_once=768
            ;;
        tiny)
            training+=(
                "${small[@]}" --decoder-layers 2 --decoder-attention-heads 4 --decoder-ffn-embed-dim 512
                --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
                --adaptive-input-cutoff 2000,10000 --adaptive-softmax-cutoff 2000,10000
                --adaptive-input-factor 4 --adaptive-softmax-factor 4
                --max-update "${UPDATES:-400}" --total-num-update "${UPDATES:-400}" --warmup-updates 50 --lr 0.003
                --tokens-per-sample 128 --max-tokens 2048 --validate-interval 1000 --save-interval 1000
            )
            tokens_per_sample=128 context_window=64 scored_at_once=4096
            ;;
        small)
            training+=(
                "${small[@]}" --decoder-layers 6 --decoder-attention-heads 4 --decoder-ffn-embed-dim 1024
                --decoder-embed-dim 256 --decoder-input-dim 256 --decoder-output-dim 256
                --adaptive-input-cutoff 4000,16000 --adaptive-softmax-cutoff 4000,16000
                --adaptive-input-factor 4 --adaptive-softmax-factor 4
                --max-update "${UPDATES:-3600}" --total-num-update "${UPDATES:-3600}" --warmup-updates 300 --lr 0.002
                --tokens-per-sample 256 --max-tokens 2048
            )
            tokens_per_sample=256 context_window=128 scored_at_once=4096
            ;;
        paper)
            training+=(
                --arch transformer_lm_wiki103 --max-update 286000 --lr 1.0 --t-mult 2 --lr-period-updates 270000
                --lr-scheduler cosine --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-07
                --stop-min-lr 1e-09 --optimizer nag --min-lr 0.0001 --clip-norm 0.1 --max-tokens 3072
                --update-freq 3 --tokens-per-sample 3072 --skip-invalid-size-inputs-valid-test
            )
            tokens_per_sample=3072 context_window=1536 scored_at_once=3072
            if [ ${#device[@]} = 0 ]; then
                device=(--fp16)
            fi
            ;;
        *)
            echo "error: there is no size $1; choose toy, tiny, small or paper" >&2
            exit 1
            ;;
    esac
    context=(
        "${any_break[@]}" --tokens-per-sample "$tokens_per_sample" --context-window "$context_window"
        --max-tokens "$scored_at_once"
    )
}

# expect DISK MEMORY TIME: what a script takes at full size, said before it starts
expect() {
    printf 'At full size: disk %s; memory %s; time %s.\n' "$@"
    if [ -n "${SMALL:-}" ]; then
        echo "At this small size: less than 0.5 GB of disk, 2 GB of memory and some minutes for the whole recipe."
    fi
}

# beside WHAT OURS PAPER: our number and the paper's in one line
beside() {
    printf '%-40s ours %12s   paper %12s\n' "$@"
}

# show COMMAND...: print a command in lines of moderate length, ready to be copied
show() {
    local line='$' word
    for word in "$@"; do
        if [[ $word == *[!A-Za-z0-9_./=,-]* ]]; then
            word="'$word'"
        fi
        if [[ $word == --* ]] && ((${#line} > 90)); then
            printf '%s \\\n' "$line"
            line='   '
        fi
        line+=" $word"
    done
    printf '%s\n' "$line"
}

# fairseq logs as "time | INFO | name | message" or as "INFO:name:message", depending on the command; our own lines have
# the time of day before them. Of training, every 100 updates are a line, of dumping and searching every half minute.
lines_that_matter='
    s/^.*\r//
    s/^[-0-9:, ]+\| INFO \| [A-Za-z0-9_.]+ \| //
    s/^INFO:[A-Za-z0-9_.]+://
    s/^[0-9]{2}:[0-9]{2}:[0-9]{2} //
    /^(train|valid|test): /p
    s/^\[None\] (.* replaced .*)$/\1/p
    s/^(epoch [0-9]+ \| valid .*loss [0-9.]+ \| ppl [0-9.]+).*$/\1/p
    s/^(epoch [0-9]+): +([0-9]+) \/ ([0-9]+) loss=([0-9.]+),.*num_updates=([0-9]+),.*$/training: \1, \2 of \3, update \5, loss \4/p
    /^(temperature|lambda|k|cache lambda) .*(tuned on|distances between)|^(hint|warning): /p
    /^ +tokens +LM|^ *valid, |^ *test, |^--knn-/p
    /^[a-z][a-z ,0-9]*: [0-9,]+ of [0-9,]+.*( left| so far)$/p
    /^(dumping |saving |.* is complete|index |Evaluated |Loss \(base 2\): [0-9]|kNN-LM: )/p'

# duration SECONDS: as a person says it
duration() {
    if (($1 < 100)); then
        echo "$1 s"
    else
        echo "$((($1 + 30) / 60)) min"
    fi
}

# step NAME COMMAND...: show a command and run it, unless it has succeeded before. The whole output goes to a log, the
# lines that matter to the screen, and at the end how long it took. A script that sets `steps` is told which one it is.
step_number=0
step() {
    local name=$1 log=$logs/$1.log started=$SECONDS title
    shift
    step_number=$((step_number + 1))
    title="[$name]${steps:+ step $step_number of $steps:}"
    if [ -e "$logs/$name.done" ]; then
        printf '%s done before, see %s\n' "$title" "$log"
        return
    fi
    printf '\n%s all of its output: %s\n' "$title" "$log"
    show "$@"
    if ! "$@" 2>&1 | tee "$log" | sed -u -n -E "$lines_that_matter"; then
        printf '\n[%s] failed; the end of %s says why:\n\n' "$name" "$log" >&2
        tail -n 3 "$log" | cut -c 1-300 >&2
        exit 1
    fi
    touch "$logs/$name.done"
    printf '[%s] took %s\n' "$name" "$(duration $((SECONDS - started)))"
}

# perplexity STEP: what fairseq-eval-lm reported at the end of its log
perplexity() {
    sed -n -E 's/^.*Perplexity: ([0-9.]+).*$/\1/p' "$logs/$1.log" | tail -n 1
}

# parameters STEP: of the LM that a step with fairseq-train trained
parameters() {
    sed -n -E 's/^.*num\. shared model params: ([0-9,]+).*$/\1/p' "$logs/$1.log" | head -n 1
}

# speed STEP: its tokens per second
speed() {
    sed -n -E 's/^.*\(([0-9.]+) tokens\/s\).*$/\1/p' "$logs/$1.log" | tail -n 1
}

# tuned STEP: the flags that a step with knnlm tune printed
tuned() {
    grep -m 1 '^--knn-' "$logs/$1.log"
}

# tuned_perplexity STEP: the perplexity that it promised, of the text it was tuned on
tuned_perplexity() {
    sed -n -E 's/^.*gives a perplexity of ([0-9.]+)\. .*$/\1/p' "$logs/$1.log"
}

# entries DATASTORE: how many its manifest says
entries() {
    sed -n -E 's/^ *"entries": ([0-9]+),?$/\1/p' "$1/manifest.json" | head -n 1
}

# count_tokens FILE: words and ends of lines, as fairseq-preprocess counts them
count_tokens() {
    awk '{ n += NF + 1 } END { print n + 0 }' "$1"
}
