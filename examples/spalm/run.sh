#!/usr/bin/env bash
# All of it, from the text to the page; what is done is skipped.
set -euo pipefail
for script in "$(dirname "${BASH_SOURCE[0]}")"/[0-9]_*.sh; do
    printf '\n=== %s\n' "$script"
    "$script"
done
