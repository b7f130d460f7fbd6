"""How long a search takes when its lists are spread over nodes, from measured costs and from real visits.

A node's work on some queries is made of three parts: every list that is visited (Python, the start of a product), every
entry of such a list (reading, decoding) and every pair of a query and an entry (the product, the exponential):

    seconds = list_seconds * lists + entry_seconds * entries + pair_seconds * pairs      on one processor

Which queries visit which list is taken from real queries, and lists are cut into ranges as the engine cuts them, so the
slowest node is slowest by as much as it would be. The driver chooses lists, sends queries, and joins sums. Queries go
in parts, and while nodes search one part the driver prepares the next: the slower of the two decides.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fairseq_knnlm.search.visitor import cut_evenly

SIZES = (103_227_021, 1_000_000_000, 3_000_000_000)
NODE_MEMORY = 64e9  # of a node of the sizing table, in bytes; some of it is left for the system
USABLE = 0.8
NODE_PROCESSORS = 16
MOST_LISTS = 1 << 18  # of the index auto
ENTRIES_PER_LIST = 640
RUN_BYTES = 6  # beside the lists, of a run of equal values; at most one for every entry


@dataclass
class Costs:
    """Seconds of one processor, and what lies between two machines."""

    threads: int
    dim: int
    row_bytes: int
    list_seconds: float
    entry_seconds: float
    pair_seconds: float
    coarse_seconds: float  # to choose the lists of a query
    join_seconds: float  # to join the sums of a query, of one actor
    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def of(cls, measured: dict[str, Any]) -> "Costs":
        return cls(**{field.name: measured[field.name] for field in fields(cls)})


class Visits:
    """Which queries visit which lists."""

    def __init__(self, near: np.ndarray, sizes: np.ndarray):
        self.near, self.sizes = near, np.asarray(sizes, np.int64)
        self.counts = np.bincount(near[near >= 0].ravel(), minlength=len(sizes))  # of each list

    def features(self, first: int = 0, stop: int | None = None) -> tuple[int, int, int]:
        """Of the lists [first, stop): those visited, their entries, and pairs of a query and an entry."""
        counts, sizes = self.counts[first:stop], self.sizes[first:stop]
        visited = (counts > 0) & (sizes > 0)
        return int(visited.sum()), int(sizes[visited].sum()), int((counts * sizes).sum())

    def rows(self, first: int, stop: int) -> tuple[int, int]:
        """How many queries visit a list of [first, stop), and the most such lists of one query."""
        own = ((self.near >= first) & (self.near < stop)).sum(axis=1)
        return int((own > 0).sum()), int(own.max(initial=0))

    def ranges(self, parts: int) -> list[tuple[int, int]]:
        """As ``share_lists`` cuts them: by bytes and by work."""
        work = self.counts * self.sizes
        costs = self.sizes / max(self.sizes.sum(), 1) + work / max(work.sum(), 1)
        return cut_evenly(np.concatenate([[0.0], np.cumsum(costs)]), np.ones(parts))

    def facts(self) -> dict[str, float]:
        lists, entries, pairs = self.features()
        return {"visited_lists": lists, "visited_entries": entries, "pairs": pairs}


@dataclass
class Predicted:
    """One search for all queries."""

    queries: int
    seconds: float
    slowest_node: float
    mean_node: float
    driver: float
    network: float
    sent: int

    def facts(self) -> dict[str, float]:
        return {"queries_per_second": self.queries / self.seconds, **vars(self)}


def simulate_search(visits: Visits, costs: Costs, actors: int, shared_cores: int | None = None) -> Predicted:
    """All queries of ``visits`` at once, over so many actors.

    Args:
        shared_cores: all actors and the driver are on one machine with so many; None: every actor has a machine
    """
    queries = len(visits.near)
    work, sent = [], 0
    for first, stop in visits.ranges(actors):
        if first == stop:
            continue
        lists, entries, pairs = visits.features(first, stop)
        work.append(costs.list_seconds * lists + costs.entry_seconds * entries + costs.pair_seconds * pairs)
        rows, most = visits.rows(first, stop)
        sent += rows * (4 * costs.dim + 8 + 4 * most)
    driver = queries * (costs.coarse_seconds / costs.threads + costs.join_seconds * len(work))
    network = sent / costs.bytes_per_second + costs.latency_seconds
    if shared_cores is not None:
        threads = max(1, shared_cores // len(work))
        searching = max(sum(work) / shared_cores, max(work) / threads)
        seconds = driver + network + searching
    else:
        searching = max(work) / costs.threads
        seconds = max(driver, network, searching)  # one after the other for one part, and all at once for many
    return Predicted(
        queries, seconds, max(work) / costs.threads, sum(work) / len(work) / costs.threads, driver, network, sent
    )


def simulate_sizes(visits: Visits, costs: Costs) -> list[dict[str, Any]]:
    """Other sizes, with nodes of 64 GB and 16 processors: as few as hold the lists, and 16 and 64 of them.

    A list of the index auto has 640 entries, up to 262,144 lists; then lists grow. How uneven the nodes are is taken
    from the real queries.
    """
    queries, nprobe = visits.near.shape
    rows = []
    for entries in SIZES:
        lists = min(MOST_LISTS, 1 << round(np.log2(entries / ENTRIES_PER_LIST)))
        memory = entries * (costs.row_bytes + RUN_BYTES)
        least = int(np.ceil(memory / (USABLE * NODE_MEMORY)))
        for nodes in sorted({least, *(count for count in (16, 64) if count >= least)}):
            uneven = _unevenness(visits, nodes)
            visited = min(lists, queries * nprobe)
            per_query = nprobe * entries / lists
            total = (
                costs.list_seconds * visited
                + costs.entry_seconds * visited * entries / lists
                + costs.pair_seconds * queries * per_query
            )
            searching = uneven * total / nodes / NODE_PROCESSORS
            asked = min(nodes, _mean_actors(visits, nodes))
            network = queries * asked * (4 * costs.dim + 8 + 4 * nprobe / asked) / costs.bytes_per_second
            driver = queries * (costs.coarse_seconds / NODE_PROCESSORS + costs.join_seconds * nodes)
            slowest = {"nodes": searching, "network": network, "driver": driver}
            rows.append(
                {
                    "entries": entries, "bytes_per_entry": costs.row_bytes + RUN_BYTES, "nodes": nodes,
                    "memory_per_node": memory / nodes, "tokens_per_second": queries / max(slowest.values()),
                    "limited_by": max(slowest, key=lambda name: slowest[name]), "queries": queries,
                }
            )  # fmt: skip
    return rows


def _unevenness(visits: Visits, nodes: int) -> float:
    """The pairs of the slowest node, relative to the mean."""
    pairs = [visits.features(first, stop)[2] for first, stop in visits.ranges(nodes)]
    return max(pairs) * nodes / max(sum(pairs), 1)


def _mean_actors(visits: Visits, nodes: int) -> float:
    """How many nodes a query goes to."""
    return sum(visits.rows(first, stop)[0] for first, stop in visits.ranges(nodes)) / len(visits.near)
