# shellcheck shell=bash
# Settings of the enwik8 recipe, which is the SPALM recipe on characters; every script reads them. All can be set in the
# environment, and so can those of examples/spalm/settings.sh.
#
#   ENWIK8   the file enwik8, instead of a download
#   WORK     where everything goes (default: enwik8)
#   SMALL    anything: toy models, for any small text in ENWIK8, in minutes
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${WORK:=enwik8}" "${ENWIK8:=}" "${SMALL:=}"
# The paper's: 24 layers of 512, two neighbours, more memory at test time; no adaptive softmax for 256 types.
export WORK SMALL CUTOFFS="" K=2 TEXT=$WORK/text
if [ -z "$SMALL" ]; then
    export LAYERS="${LAYERS:-24}" DIM="${DIM:-512}" FFN="${FFN:-2048}" HEADS="${HEADS:-8}" LR="${LR:-0.00025}"
    export SEGMENT="${SEGMENT:-512}" MEMORY="${MEMORY:-512}" TEST_MEMORY="${TEST_MEMORY:-3072}" LANES="${LANES:-16}"
    export UPDATES="${UPDATES:-400000}" WARM_UP="${WARM_UP:-4000}"
fi
