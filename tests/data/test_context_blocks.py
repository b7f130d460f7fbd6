"""Blocks with their left context."""

import numpy as np
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.data.monolingual_dataset import MonolingualDataset

from fairseq_knnlm.data.context_blocks import ContextBlockDataset


def test_contexts_are_at_least_the_window(corpus):
    """The arithmetic of --tokens-per-sample and --context-window: every block but the first sees the whole window."""
    dictionary = Dictionary.load(str(corpus / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(corpus / "train"), dictionary)
    tokens_per_sample, context_window = 96, 48
    size = tokens_per_sample - context_window  # as fairseq-eval-lm computes it
    blocks = TokenBlockDataset(
        lines, lines.sizes, size, pad=dictionary.pad(), eos=dictionary.eos(), break_mode="none", include_targets=True
    )
    dataset = MonolingualDataset(
        blocks, blocks.sizes, dictionary, dictionary, add_eos_for_other_targets=False, shuffle=False, targets=["future"]
    )
    ours = ContextBlockDataset(dataset, size, context_window, [(0, len(dataset))])
    stream = np.concatenate([line.numpy() for line in lines])
    position = 0
    for number in range(len(ours)):
        item = ours[number]
        own = item["target"][item["start"] :].numpy()
        np.testing.assert_array_equal(own, stream[position : position + len(own)])
        seen = item["start"]
        assert seen == min(position, context_window)
        before = item["source"][: item["start"] + 1].numpy()  # the token before the first target comes last
        expected = np.concatenate([[dictionary.eos()], stream])[position - seen : position + 1]
        np.testing.assert_array_equal(before, expected)
        position += len(own)
    assert position == len(stream)
