#!/usr/bin/env bash
# All of it, from the books to the table; what is done is skipped.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
"$here/../run_all.sh" "$here"
