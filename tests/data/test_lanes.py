"""A text in lanes, segment by segment."""

import numpy as np
import pytest
from networks import Dictionary

from fairseq_knnlm.data.lanes import LaneDataset


@pytest.mark.parametrize("lanes, length, shards", [(1, 7, 1), (3, 5, 1), (4, 8, 2), (50, 3, 1)])
def test_every_token_once_and_in_order(lanes, length, shards):
    tokens = np.arange(4, 104)
    dataset = LaneDataset("train", tokens, Dictionary(), lanes, length, shards=shards)
    rows: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
    for number, batch in enumerate(dataset.batches()):
        sample = dataset.collater([dataset[index] for index in batch])
        assert sample["net_input"]["step"] == number // shards
        for index, source, target in zip(batch, sample["net_input"]["src_tokens"], sample["target"]):
            target = target[target != 1].tolist()
            source = source[: len(target)].tolist()
            assert source == [token - 1 if token > 4 else 2 for token in target]
            rows[index % lanes] += target
    assert [token for lane in range(lanes) for token in rows[lane]] == tokens.tolist()
