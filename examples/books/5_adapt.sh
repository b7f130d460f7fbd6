#!/usr/bin/env bash
# Table 4: an LM of another domain, adapted by a datastore of the books and nothing else.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ -z "$WIKI_CHECKPOINT" ]; then
    echo "[adapt] skipped: no WIKI_CHECKPOINT"
    exit
fi
expect 'as 4_in_domain.sh, once more' 'as 4_in_domain.sh' 'as 4_in_domain.sh'
memorise_and_score wiki "$WORK/bin-wiki" "$WIKI_CHECKPOINT"
echo
beside 'LM of another domain, test' "$(perplexity wiki-base-test)" 34.84
beside '  + kNN, test' "$(perplexity wiki-test)" 20.47
