"""A temperature at the scale of a datastore's own distances, for those who have not tuned one.

What a good temperature is depends on the key, the metric, the model and the size: the best ones that we know lie
between 3 and 1,300. What they have in common is how many neighbours count. At the best temperature the shares of the
1,024 nearest entries are spread as if a quarter or a third of them had equal shares and the others none
(docs/results.md: 219 to 347 effective neighbours, for every key under L2 and every size). So some entries are looked
at as if they were queries, and the temperature is chosen at which their neighbours are spread like that.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore

QUERIES = 256  # entries that are looked at
NEIGHBORS = 1024  # of each, in a datastore that has
ENTRIES_PER_NEIGHBOR = 64  # so many times as many entries; a smaller one has fewer that are near
SPREAD = 0.3  # share of the neighbours that count, at the temperature that is looked for
SAMPLE_ROWS = 1 << 17  # keys that these are compared with, at least; fewer than all are a random part
FEWEST_NEIGHBORS = 8  # in such a part, whose spread means something
NEIGHBORS_OF_A_BUILD = 32  # the same where there is more time
# A few of many neighbours look more evenly spread than all of them, so the temperature comes out too low: with m of
# them by 1 / (1 + 16 / m), on Wikipedia (10.3 million entries) and on Python's documentation, for m from 13 to 1,024.
FEW_LOOK_EVEN = 16
RUN = 64  # consecutive keys of the sample, which are one read
RUNS_AT_ONCE = 512
WIDTH, BISECTIONS = 8.0, 14  # of the search for a temperature: its range, in logarithms, and its steps
SEQUENCE = 512  # tokens, where the manifest does not say how many the model saw at once


def measure_temperature(datastore: Datastore, metric: str, thorough: bool = True, seed: int = 1) -> float | None:
    """The temperature at which a certain share of the nearest entries counts; None: there is nothing to measure.

    Args:
        thorough: compare with more keys of a large datastore, as there is time for when an index is built
    """
    entries = len(datastore)
    wanted = min(NEIGHBORS, entries // ENTRIES_PER_NEIGHBOR)
    # The nearest 1,024 of all keys are, in a part of the keys, about as many fewer as the part is smaller.
    fewest = NEIGHBORS_OF_A_BUILD if thorough else FEWEST_NEIGHBORS
    rows = min(entries, max(SAMPLE_ROWS, entries * fewest // NEIGHBORS))
    count = max(FEWEST_NEIGHBORS, round(wanted * rows / entries))
    return temperature_of_neighbors(nearest_similarities(datastore, metric, rows, min(count, entries), seed))


def temperature_of_neighbors(near: Tensor) -> float | None:
    """The temperature at which a certain share of some entries' nearest ones counts: similarities (n, k) double."""
    near = near[near[:, -1] > -math.inf]
    if len(near) == 0 or near.size(1) < FEWEST_NEIGHBORS:
        return None
    temperature = temperature_of_spread(near, SPREAD * near.size(1))
    return None if temperature is None else float(f"{temperature * (1 + FEW_LOOK_EVEN / near.size(1)):.3g}")


def nearest_similarities(datastore: Datastore, metric: str, rows: int, count: int, seed: int) -> Tensor:
    """For some entries the largest similarities with ``rows`` others: (queries, count) double, -inf: there are fewer.

    A similarity is an inner product or a negative squared distance. Entries within a sequence of a query's own position
    are left out: they are the same text, and no query of another text has such neighbours.
    """
    entries, random = len(datastore), np.random.default_rng(seed)
    chosen = np.sort(random.choice(entries, min(QUERIES, entries), replace=False))
    queries = torch.from_numpy(datastore.gather_keys(chosen).astype(np.float32))
    places, window = datastore.positions, int(datastore.manifest.source.get("tokens_per_sample", SEQUENCE))
    own = torch.from_numpy(chosen if places is None else np.asarray(places[chosen]))
    origin = queries.mean(dim=0) if metric == "l2" else torch.zeros(datastore.dim)  # near the keys, or digits are lost
    queries -= origin
    best = torch.full((len(queries), count), -math.inf)
    for ids, keys in _sampled_keys(datastore, rows, seed):
        keys -= origin
        found = queries @ keys.T
        if metric == "l2":
            found = 2 * found - keys.square().sum(dim=1) - queries.square().sum(dim=1, keepdim=True)
        other = torch.from_numpy(ids if places is None else np.asarray(places[ids]))
        found.masked_fill_((other - own[:, None]).abs() <= window, -math.inf)
        best = torch.cat([best, found], dim=1).topk(count, dim=1).values
    return best.double()


def _sampled_keys(datastore: Datastore, rows: int, seed: int) -> Iterator[tuple[np.ndarray, Tensor]]:
    """About so many entries, evenly drawn, some at a time: numbers (n,) and keys (n, dim) float32."""
    starts = RUN * np.arange(-(-len(datastore) // RUN))
    if rows < len(datastore):
        starts = np.sort(np.random.default_rng(seed).choice(starts[:-1], max(1, rows // RUN), replace=False))
    for first in range(0, len(starts), RUNS_AT_ONCE):
        runs = [(start, min(start + RUN, len(datastore))) for start in starts[first : first + RUNS_AT_ONCE].tolist()]
        keys = np.concatenate([datastore.read_keys(*run) for run in runs])
        yield np.concatenate([np.arange(*run) for run in runs]), torch.from_numpy(keys.astype(np.float32))


def temperature_of_spread(similarities: Tensor, effective: float) -> float | None:
    """The temperature at which the neighbours' shares are, on average, spread over so many: (n, k) double.

    The number is the exponential of the mean entropy of the shares, as in the summary of a run. It grows with the
    temperature from 1 to k. None: no temperature does it, because the neighbours do not differ.
    """
    gaps = (similarities.amax(dim=1, keepdim=True) - similarities).float()
    scale = float(gaps.mean())
    if not 0 < scale < math.inf:
        return None

    def entropy(temperature: float) -> float:
        weights = (gaps / -temperature).exp_()
        total = weights.sum(dim=1)  # 1 at least, for the nearest has no gap
        return float((total.log() + (weights * gaps).sum(dim=1) / total / temperature).double().mean())

    low, high = math.log(scale) - WIDTH, math.log(scale) + WIDTH
    if not entropy(math.exp(low)) < math.log(effective) < entropy(math.exp(high)):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(math.exp(middle)) < math.log(effective) else (low, middle)
    return math.exp(middle)
