#!/usr/bin/env bash
# Binarise, with a dictionary of the books and with that of WIKI_CHECKPOINT.
# shellcheck source=examples/books/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
expect 'a third of the text' '2 GB' 'minutes for 100M tokens'

binarise=(fairseq-preprocess --only-source --workers "$(nproc)")
inputs() {
    echo --trainpref "$text/$1/train.txt" --validpref "$text/$1/valid.txt" --testpref "$text/$1/test.txt"
}
# shellcheck disable=SC2046  # file names without blanks
step binarise "${binarise[@]}" --destdir "$WORK/bin" --thresholdsrc 3 $(inputs "$kind")
if [ -n "$WIKI_CHECKPOINT" ]; then
    : "${WIKI_DICT:?give it the dict.txt of WIKI_CHECKPOINT}"
    # shellcheck disable=SC2046
    step binarise-wiki "${binarise[@]}" --destdir "$WORK/bin-wiki" --srcdict "$WIKI_DICT" $(inputs words)
fi
beside 'types in the dictionary' "$(wc -l <"$WORK/bin/dict.txt")" '29K (BPE)'
