#!/usr/bin/env bash
# All of it, from the text to the table and the plot; what is done is skipped.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
"$here/../run_all.sh" "$here"
