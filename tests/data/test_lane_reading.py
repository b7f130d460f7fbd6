"""A text that is read in several lanes: who reads what, and results back in order."""

import numpy as np
import pytest
import torch
from networks import Dictionary, decoder

from fairseq_knnlm.data.context_blocks import own_positions
from fairseq_knnlm.data.lane_reading import LaneGroups, corpus_order, plan_lanes, rows_in_order
from fairseq_knnlm.data.lanes import LaneDataset
from fairseq_knnlm.keys.running import for_each_batch
from fairseq_knnlm.models.transformer_xl import TransformerXLLanguageModel


def test_the_example_of_the_docstring():
    assert plan_lanes(0, 10, 2, 2) == [(0, 0, 6), (4, 6, 10)]


@pytest.mark.parametrize("first, last, lanes, warm_up", [(0, 100, 8, 3), (7, 50, 4, 5), (3, 4, 32, 9), (2, 90, 90, 0)])
def test_lanes_cover_the_range_and_warm_up(first, last, lanes, warm_up):
    parts = plan_lanes(first, last, lanes, warm_up)
    assert [part[1] for part in parts] + [last] == [first] + [part[2] for part in parts] and len(parts) <= lanes
    assert all(begin == max(0, start - warm_up) and stop > start for begin, start, stop in parts)
    assert len({stop - begin for begin, _, stop in parts[:-1]}) <= 1


@pytest.mark.parametrize("memory", [0, 5, 12])
@pytest.mark.parametrize("threads", [1, 2])
def test_states_are_those_of_one_lane(memory, threads):
    """Every token once, in order, with the state that a single lane gives it."""
    tokens = np.random.default_rng(1).integers(4, 40, 203)
    dataset = LaneDataset("valid", tokens, Dictionary(), 1, 4)
    model = decoder(memory_size=memory)
    language_model = TransformerXLLanguageModel(model)

    def run(batch: dict) -> torch.Tensor:
        return model.extract_features(**inputs(batch))[own_positions(batch)]

    with torch.no_grad():
        one = [model.extract_features(**inputs(dataset.collater([dataset[i]])))[0] for i in range(len(dataset))]
        expected = torch.cat(one)
        for ranges in ([(0, 51)], [(20, 30), (41, 51)]):
            groups = LaneGroups(dataset, ranges, 5, model.reach(4), groups=threads)
            found, text = [], []
            for group in groups:
                states = for_each_batch(language_model, run, group["batches"])
                found.append(torch.cat(states)[corpus_order(group["batches"])])
                text += torch.cat(rows_in_order(group["batches"])).tolist()
            places = np.concatenate([np.arange(4 * start, min(4 * stop, 203)) for start, stop in ranges])
            assert text == tokens[places].tolist()
            torch.testing.assert_close(torch.cat(found), expected[places], atol=1e-5, rtol=1e-5)
            lanes = {lane for group in groups for batch in group["batches"] for lane in lanes_of(batch)}
            assert len(lanes) >= (2 if memory < 12 and len(ranges) == 1 else 1)


def lanes_of(batch: dict) -> list[tuple[str, int]]:
    return [(batch["net_input"]["text"], row) for row in range(len(batch["id"]))]


def inputs(batch: dict) -> dict:
    return {name: batch["net_input"][name] for name in ("src_tokens", "text", "step")}
