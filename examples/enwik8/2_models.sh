#!/usr/bin/env bash
# Everything else as in examples/spalm: Transformer, Transformer-XL, neighbours, SPALM, kNN, analysis.
# At full size for GPUs; keys and index of 90 million characters take 190 GB.
# shellcheck source=examples/enwik8/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

examples/spalm/run.sh
