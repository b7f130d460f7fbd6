#!/usr/bin/env bash
# The index.                    disk and memory: 7 GB with 4-bit codes or the paper's index; 213 GB where the keys fit
#                               into memory and auto therefore keeps them whole. Says what it needs, and how long,
#                               before it starts; resumes.
# shellcheck source=examples/wikitext103/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

knnlm build "$datastore" --index "$INDEX"
