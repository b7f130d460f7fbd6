"""What a datastore found for a query, as far as a person can look at it: the nearest entries and all mass together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..search.distances import similarity_scale
from .datastore_memory import DatastoreMemory
from .probabilities import similarities


@dataclass
class Neighbor:
    """An entry that a query found."""

    entry: int  # its number in the datastore
    token: int  # its value: the token that followed
    distance: float  # squared L2 distance or inner product
    share: float  # of p_kNN
    weight: float = 1.0  # how much the entry counts


@dataclass
class LookUp:
    """What one datastore says of n tokens, at several temperatures."""

    log_probs: np.ndarray  # (temperatures, n) log p_kNN of the targets, -inf where it does not hold them
    log_masses: np.ndarray  # (temperatures, n) log of the softmax's denominator: of everything that took part
    entries: np.ndarray  # (n,) how many entries took part
    neighbors: list[list[Neighbor]]  # of each token the nearest ones, nearest first


def nearest_neighbors(memory: DatastoreMemory, queries: Tensor, count: int) -> list[list[Neighbor]]:
    """For each query the ``count`` entries with the largest shares, largest first: queries (n, dim) -> n lists."""
    no_targets = torch.zeros(len(queries), dtype=torch.long)
    return look_up(memory, queries, no_targets, [memory.temperature], count).neighbors


def look_up(
    memory: DatastoreMemory, queries: Tensor, targets: Tensor, temperatures: list[float], count: int
) -> LookUp:
    """What scoring used, and the ``count`` nearest entries of each query: queries (n, dim), targets (n,).

    Shares are those at the memory's own temperature, which has to be one of ``temperatures``. With every visited entry
    (k = all) there is no list of neighbours: then the nearest ones are picked for showing, and their shares are of the
    same total as in scoring, the far field's estimate included.
    """
    vectors, wanted = memory.project(queries), targets.cpu().numpy()
    found: Iterable[tuple[np.ndarray, np.ndarray]]
    if memory.k is None:
        target_mass, total_mass = memory.engine.target_mass(vectors, wanted, temperatures)
        found = _visited(memory, vectors)
    else:
        distances, ids = memory.engine.search(vectors, memory.k)
        target_mass, total_mass = _masses(memory, distances, ids, wanted, temperatures)
        found = zip(distances, ids)
    with np.errstate(invalid="ignore"):  # -inf - -inf: nothing was found
        log_probs = np.nan_to_num(target_mass - total_mass, nan=-np.inf, neginf=-np.inf)
    own_mass = total_mass[temperatures.index(memory.temperature)]
    result = LookUp(log_probs, total_mass, np.zeros(len(vectors), np.int64), [])
    for number, (own_distances, own_ids) in enumerate(found):
        result.entries[number] = np.count_nonzero(own_ids >= 0)
        result.neighbors.append(_nearest(memory, own_distances, own_ids, own_mass[number], count))
    return result


def _visited(memory: DatastoreMemory, vectors: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Distances (m,) and ids (m,) of all that each query (dim,) visits; one after the other, because m is large."""
    for vector in vectors:
        distances, ids = memory.engine.visited(vector[None])
        yield distances[0], ids[0]


def _masses(
    memory: DatastoreMemory, distances: np.ndarray, ids: np.ndarray, targets: np.ndarray, temperatures: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """As ``Search.target_mass`` gives them, of neighbours (n, k) that are known: (temperatures, n) each."""
    near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), memory.metric).double()
    matches = torch.from_numpy((memory.datastore.values_of(ids) == targets[:, None]) & (ids >= 0))
    hits = near.masked_fill(~matches, -torch.inf)
    found = memory.datastore.log_weights_of(ids)
    own = 0.0 if found is None else torch.from_numpy(found).double()
    return (
        np.stack([(hits / temperature + own).logsumexp(dim=1).numpy() for temperature in temperatures]),
        np.stack([(near / temperature + own).logsumexp(dim=1).numpy() for temperature in temperatures]),
    )


def _nearest(
    memory: DatastoreMemory, distances: np.ndarray, ids: np.ndarray, log_mass: float, count: int
) -> list[Neighbor]:
    """Of the entries that a query found those with the largest shares: distances (m,), ids (m,), -1 for none."""
    present = np.flatnonzero(ids >= 0)
    scores = distances[present].astype(np.float64) * similarity_scale(memory.metric, memory.temperature)
    log_weights = memory.datastore.log_weights_of(ids[present])
    if log_weights is not None:
        scores += log_weights
    best = np.argsort(-scores, kind="stable")[:count]
    chosen = present[best]
    weights = np.ones(len(best)) if log_weights is None else np.exp(log_weights[best])
    shares = np.exp(np.minimum(scores[best] - log_mass, 0.0))  # distances of two ways to compute them round differently
    return [
        Neighbor(int(entry), int(token), float(distance), float(share), float(weight))
        for entry, token, distance, share, weight in zip(
            ids[chosen], memory.datastore.values_of(ids[chosen]), distances[chosen], shares, weights
        )
    ]
