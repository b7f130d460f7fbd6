"""Which actor owns which lists, and on which node it lives."""

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import KnnlmError
from ..search.coarse import CoarseQuantizer
from ..search.visitor import cut_evenly
from ..storage import human_bytes
from .nodes import Node

SAMPLE = 1 << 14  # centroids that stand for queries
SHARE_OF_GPU = 0.6  # of its free memory, for lists


@dataclass
class Seat:
    """Where one actor lives."""

    node: Node
    threads: int
    processors: list[int] | None = None  # that it is pinned to
    gpu: bool = False


def seats(nodes: list[Node], device: str, count: int | None = None) -> list[Seat]:
    """A seat for every actor: one for each socket of each node, or as many as its resource says; or for each GPU.

    Args:
        device: cpu or cuda
        count: so many actors in turns over the nodes, instead
    """
    chosen = [node for node in nodes if node.actors_wanted] or nodes
    if count is not None:
        numbers = [len(range(place, count, len(chosen))) for place in range(len(chosen))]
        return [seat for node, own in zip(chosen, numbers) for seat in _plain_seats(node, own)]
    found: list[Seat] = []
    for node in chosen:
        if device == "cuda":
            threads = max(1, int(node.processors) // max(1, node.gpus))
            found += [Seat(node, threads, gpu=True) for _ in range(node.gpus)]
        elif node.actors_wanted or len(node.sockets) < 2:
            found += _plain_seats(node, node.actors_wanted or 1)
        else:
            share = max(1, int(node.processors) // len(node.sockets))
            found += [Seat(node, min(share, len(own)), own) for own in node.sockets]
    if not found:
        raise KnnlmError("no node of the Ray cluster has a GPU that Ray knows of; use --knn-device cpu")
    return found


def _plain_seats(node: Node, count: int) -> list[Seat]:
    return [Seat(node, max(1, int(node.processors) // count)) for _ in range(count)]


def choose_device(wanted: str, nodes: list[Node], list_bytes: int) -> str:
    """cpu or cuda. auto: the GPUs, if every node has some and the lists fit into them."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise KnnlmError(
            f"with --knn-engine ray every actor has its own GPU; use --knn-device cuda, cpu or auto, not '{wanted}'"
        )
    if wanted != "auto":
        return wanted
    free = [node.facts.get("gpu_memory") or [] for node in nodes]
    fits = list_bytes <= SHARE_OF_GPU * sum(map(sum, free))
    return "cuda" if fits and all(free) and all(node.gpus for node in nodes) else "cpu"


def check_memory(nodes: list[Node], list_bytes: int, name: str) -> None:
    """Refuse lists that the nodes cannot hold together: they would be read from disk again and again."""
    memory = sum(node.memory for node in nodes)
    if list_bytes > memory:
        raise KnnlmError(
            f"the lists of {name} take {human_bytes(list_bytes)}, but the {len(nodes)} nodes have "
            f"{human_bytes(memory)} of memory in all; add nodes, make the keys smaller with knnlm compact, or use "
            "--knn-engine local, which reads lists from disk"
        )


def expected_visits(coarse: CoarseQuantizer, centroids: np.ndarray, sizes: np.ndarray, nprobe: int) -> np.ndarray:
    """How often each list is visited by queries that are spread as the keys are: (lists,), the sum is 1.

    A list of many keys has many queries near its centroid, and these visit the lists around it, too.

    Args:
        centroids: (lists, dim), of which some stand for queries
        sizes: (lists,)
    """
    some = np.arange(0, len(centroids), max(1, len(centroids) // SAMPLE))
    near, _ = coarse.nearest(torch.from_numpy(np.ascontiguousarray(centroids[some])), nprobe)
    weights = np.where(near < 0, 0, sizes[some, None]).astype(np.float64)
    visits = np.bincount(np.maximum(near, 0).ravel(), weights.ravel(), minlength=len(sizes))
    return visits / max(visits.sum(), 1.0)


def share_lists(sizes: np.ndarray, visits: np.ndarray, places: list[Seat], row_bytes: int) -> list[tuple[int, int]]:
    """A contiguous range of lists for every seat: first list, and the one after the last; some may be empty.

    The cost of a list is the mean of its share of all bytes and of its share of all work, which is visits times
    entries. Where a node's part does not fit into its memory, the ranges go by the memory of the nodes alone.
    """
    work = visits * sizes
    costs = (sizes / max(sizes.sum(), 1) + work / max(work.sum(), 1e-300)) / 2
    ranges = cut_evenly(_ends(costs), np.ones(len(places)))
    own = np.array([sizes[first:stop].sum() * row_bytes for first, stop in ranges])
    room = np.array([place.node.memory / _actors_on(place.node, places) for place in places])
    if (own > room).any():
        ranges = cut_evenly(_ends(sizes), room)
    return ranges


def _actors_on(node: Node, places: list[Seat]) -> int:
    return sum(place.node is node for place in places)


def _ends(costs: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
