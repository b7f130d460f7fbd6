#!/usr/bin/env bash
# run_all.sh FOLDER: the numbered scripts of a recipe, one after the other, with how long each of them takes.
set -euo pipefail
shopt -s nullglob
scripts=("$1"/[0-9]_*.sh)
number=0
for script in "${scripts[@]}"; do
    number=$((number + 1))
    started=$SECONDS
    printf '\n=== step %s of %s: %s\n' "$number" "${#scripts[@]}" "$script"
    "$script"
    printf '=== step %s of %s took %s min %s s\n' "$number" "${#scripts[@]}" \
        $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60))
done
