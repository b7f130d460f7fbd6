#!/usr/bin/env bash
# Table 3 and Figure 2: the little LM reads everything once, without training, and is scored with that datastore and
# with random parts of it; both LMs alone. examples/papers/scaling.py shows every command.
# shellcheck source=examples/scaling/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'for each million tokens of train 2 GB (SIZE=small), parts and indexes included' "the largest index's and 2 GB" \
    'a forward pass over twice the tokens of train; ten of valid, with the search'

python examples/papers/scaling.py "$WORK/bin-large" "$large" "$WORK" --little "$little" --parts 2 \
    --fractions "$fractions" --tokens-per-sample "$tokens_per_sample" --context-window "$context_window"
printf '\nTable and JSON: %s; plot: %s\n' "$WORK/results/scaling.md" "$WORK/results/scaling.svg"
