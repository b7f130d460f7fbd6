"""A datastore spread over actors of a Ray cluster: measured on this machine, and simulated for up to 64 nodes.

    python -m benchmarks.cluster --data DATA-BIN --path CHECKPOINT --datastore DIR --work DIR [PART ...]

Parts: scoring (whole scoring with 1, 2 and 4 actors beside the local engine), search (the search alone, with the bytes
that go out and come back), costs (seconds for a visit, an entry, a byte, a question), simulation (from the costs and
from which lists the queries really visit; first of what was measured, then of more nodes). All nodes are processes of
this machine, so they share its cores: what is to be seen here is the overhead, not a gain.
``--report JSON`` writes the page of an earlier run beside it; its table is in docs/cluster.md, too.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from ray.cluster_utils import Cluster

from fairseq_knnlm.cluster.connection import connect
from fairseq_knnlm.cluster.ray_search import RaySearch, make_ray_search
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index_if_missing
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.search import ListSearch
from fairseq_knnlm.search.list_blocks import KeyDecoder
from fairseq_knnlm.search.own_text import query_vectors
from fairseq_knnlm.storage import write_json

from .cluster_page import write_page
from .cluster_simulation import Costs, Visits, simulate_search, simulate_sizes
from .command import warm
from .setting import Setting

PARTS = ("scoring", "search", "costs", "simulation")
ACTORS = (1, 2, 4)
NODES = (1, 2, 4, 8, 16, 32, 64)
ECHO_BYTES = 1 << 26


def engines(setting: Setting, nprobe: int) -> tuple[Datastore, ListSearch, np.ndarray, np.ndarray]:
    """The datastore, the local engine, and all queries with their targets."""
    datastore, queries = Datastore(setting.datastore), setting.queries()
    info = build_index_if_missing(datastore, None, "l2")
    engine = make_engine(datastore, info, None, "l2", "index", "exact", nprobe)
    if not isinstance(engine, ListSearch):
        raise SystemExit("error: the datastore is searched without lists; give a larger one")
    vectors = query_vectors(datastore, queries, np.arange(len(queries)))
    return datastore, engine, vectors, np.asarray(queries.values, np.int64)


@contextmanager
def one_machine(actors: int) -> Iterator[str]:
    """A cluster of one node with so many actors, as a process of this machine; its address."""
    threads = torch.get_num_threads()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": threads, "resources": {"knnlm": actors}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


# --- scoring ----------------------------------------------------------------------------------------------------------


def measure_scoring(setting: Setting, rounds: int, nprobe: int) -> dict:
    """Whole scoring by fairseq-eval-lm: the median of some rounds in turns."""
    flags = ["--knn-datastore", setting.datastore, "--knn-nprobe", nprobe]
    data = setting.part()
    runs: dict[str, list[dict]] = {name: [] for name in ("local", *map(str, ACTORS))}
    for _ in range(rounds):
        runs["local"].append(setting.eval_lm(*flags, data=data))
        for actors in ACTORS:
            with one_machine(actors) as address:
                ray_flags = ["--knn-engine", "ray", "--knn-ray-address", address]
                runs[str(actors)].append(setting.eval_lm(*flags, *ray_flags, data=data))
    result = {}
    for name, own in runs.items():
        tokens = statistics.median(run["tokens_per_second"] for run in own)
        result[name] = {
            "tokens_per_second": tokens,
            "model_seconds": statistics.median(run["model"] for run in own),
            "search_seconds": statistics.median(run["search"] for run in own),
            "perplexity": own[0]["perplexity"],
            "tokens": own[0]["tokens"],
        }
    return result


# --- search -----------------------------------------------------------------------------------------------------------


def measure_search(setting: Setting, rounds: int, nprobe: int) -> dict:
    """The search for all queries at once, without a model: seconds, bytes, and the largest difference."""
    datastore, local, vectors, targets = engines(setting, nprobe)
    warm(datastore.folder / "index" / "auto" / "index.faiss")
    expected = local.target_mass(vectors, targets, [10.0])
    result = {"queries": len(vectors), "local": {"seconds": best(rounds, lambda: search(local, vectors, targets))}}
    for actors in ACTORS:
        with one_machine(actors) as address:
            engine = ray_engine(datastore, nprobe, address)
            found = engine.target_mass(vectors, targets, [10.0])
            before = (engine.traffic.sent, engine.traffic.received)
            seconds = best(1, lambda own=engine: search(own, vectors, targets))
            sent, received = engine.traffic.sent - before[0], engine.traffic.received - before[1]
            seconds = min(seconds, best(rounds - 1, lambda own=engine: search(own, vectors, targets)))
            result[str(actors)] = {
                "seconds": seconds,
                "sent": sent,
                "received": received,
                "difference": max(largest_difference(one, other) for one, other in zip(found, expected)),
                "one_query_seconds": best(20, lambda own=engine: own.visited_masses(vectors[:1], 10.0)),
            }
            end(engine)
    result["local"]["one_query_seconds"] = best(20, lambda: local.visited_masses(vectors[:1], 10.0))
    return result


def search(engine: ListSearch, vectors: np.ndarray, targets: np.ndarray) -> None:
    engine.target_mass(vectors, targets, [10.0])


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Of two sums of logs; a target that neither has found (-inf) is no difference, one that only one has is inf."""
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(one - other)))


def ray_engine(datastore: Datastore, nprobe: int, address: str) -> RaySearch:
    info = build_index_if_missing(datastore, None, "l2")
    return make_ray_search(datastore, info, nprobe, 0, address, "cpu")


def end(engine: RaySearch) -> None:
    import ray

    engine.close()
    ray.shutdown()


def best(rounds: int, function: Callable[[], object]) -> float:
    """The least seconds of some rounds; infinite of none."""
    times = [float("inf")]
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


# --- costs ------------------------------------------------------------------------------------------------------------


def measure_costs(setting: Setting, rounds: int, nprobe: int) -> dict:
    """Constants of the simulation, each from a measurement of its own."""
    _, local, vectors, targets = engines(setting, nprobe)
    threads = torch.get_num_threads()
    near = local._nearest_lists(vectors)[0]
    coarse = best(rounds, lambda: local._nearest_lists(vectors)) / len(vectors)
    visits = Visits(near, local.lists.sizes)
    rows, seconds = [], []
    for share in (1, 2, 4, 8, 16, 32):  # the fewer queries, the more the reading and decoding of a list counts
        some = slice(0, max(64, len(vectors) // share))
        own = Visits(near[some], local.lists.sizes)
        rows.append(own.features())
        question = (torch.from_numpy(vectors[some]), targets[some], near[some], [10.0], False)
        seconds.append(threads * best(rounds, lambda ask=question: local.visitors[0].masses(*ask)))
    features, taken = np.array(rows), np.array(seconds)
    # Lists and their entries grow together here, so a fit could not tell them apart: entries are measured alone.
    per_entry = best(rounds, lambda: decode_all(local)) / int(local.lists.sizes.sum())
    rest = np.maximum(taken - per_entry * features[:, 1], 0.05 * taken)
    per_list, per_pair = fit(features[:, [0, 2]], rest)
    predicted = features @ [per_list, per_entry, per_pair]
    join = best(rounds, lambda: np.logaddexp(*np.zeros((2, 2, len(vectors))))) / len(vectors)
    latency, bandwidth = measure_transport(threads)
    return {
        "threads": threads, "dim": vectors.shape[1], "queries": len(vectors), "nprobe": nprobe,
        "list_seconds": per_list, "entry_seconds": per_entry, "pair_seconds": per_pair,
        "fit_error": float(np.abs(predicted / taken - 1).max()),
        "coarse_seconds": coarse * threads, "join_seconds": join, "latency_seconds": latency,
        "bytes_per_second": bandwidth, "row_bytes": local.ivf.code_size + 8, **visits.facts(),
    }  # fmt: skip


def decode_all(engine: ListSearch) -> None:
    """Read every list, and make floats of its keys, on one processor."""
    decoder = KeyDecoder(engine.datastore.codec, torch.device("cpu"))
    for block in engine.lists.stream(np.flatnonzero(engine.lists.sizes)):
        decoder.decode(block.stored, None)


def fit(rows: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Costs of 0 or more that explain the seconds, with equal relative errors."""
    from scipy.optimize import nnls

    scale = rows.max(axis=0)
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
    return (found / scale).tolist()


def measure_transport(threads: int) -> tuple[float, float]:
    """Seconds of an empty question, and bytes per second from the driver into an actor."""

    class Echo:
        def size(self, data: np.ndarray | None = None) -> int:
            return 0 if data is None else int(data[::512].sum() * 0 + data.nbytes)

    with one_machine(1) as address:
        ray = connect(address)
        actor = ray.remote(Echo).options(num_cpus=0).remote()
        ray.get(actor.size.remote())
        latency = best(200, lambda: ray.get(actor.size.remote()))
        data = np.zeros(ECHO_BYTES // 4, np.float32)
        seconds = best(5, lambda: ray.get(actor.size.remote(ray.put(data))))
        ray.shutdown()
    return latency, ECHO_BYTES / max(seconds - latency, 1e-9)


# --- simulation -------------------------------------------------------------------------------------------------------


def simulate(setting: Setting, results: dict, nprobe: int, network: float) -> dict:
    """What was measured, from the costs alone; then other nodes and other sizes."""
    _, local, vectors, _ = engines(setting, nprobe)
    costs, measured = Costs.of(results["costs"]), results["search"]
    visits = Visits(local._nearest_lists(vectors)[0], local.lists.sizes)
    checks = []
    for actors in ACTORS:
        predicted = simulate_search(visits, costs, actors, shared_cores=costs.threads)
        seconds = measured[str(actors)]["seconds"]
        checks.append({"actors": actors, "measured": seconds, "simulated": predicted.seconds,
                       "bytes_measured": measured[str(actors)]["sent"], "bytes_simulated": predicted.sent})  # fmt: skip
    over_network = Costs.of({**results["costs"], "bytes_per_second": network})
    growth = []
    for nodes in NODES:
        predicted = simulate_search(visits, over_network, nodes)
        growth.append({"nodes": nodes, **predicted.facts()})
    return {"checks": checks, "growth": growth, "network_bytes_per_second": network,
            "sizes": simulate_sizes(visits, over_network)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--data", type=Path, help="binarised corpus with valid")
    parser.add_argument("--path", type=Path, help="checkpoint")
    parser.add_argument("--datastore", type=Path, help="of train")
    parser.add_argument("--work", type=Path, default=Path("bench"), help="for what is made (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=60_000, help="of valid (default: %(default)s)")
    parser.add_argument("--nprobe", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--network-gbit", type=float, default=10.0, help="for the simulation (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="JSON file (default: WORK/cluster.json)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only write the page of an earlier run beside it")
    args = parser.parse_args()
    if args.report:
        write_page(args.report)
        return
    if not (args.data and args.path and args.datastore):
        parser.error("give --data, --path and --datastore")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.data, args.path, args.datastore, args.work, args.tokens)
    output = args.output or args.work / "cluster.json"
    results = json.loads(output.read_text()) if output.exists() else {}
    manifest = Datastore(args.datastore).manifest
    results["about"] = {
        "threads": torch.get_num_threads(), "python": platform.python_version(),
        **{name: version(name) for name in ("ray", "torch", "numpy")},
        "entries": manifest.entries, "keys": f"{manifest.dim} x {manifest.key_dtype}", "tokens": args.tokens,
    }  # fmt: skip
    steps: dict[str, Callable[[], dict]] = {
        "scoring": lambda: measure_scoring(setting, args.rounds, args.nprobe),
        "search": lambda: measure_search(setting, args.rounds, args.nprobe),
        "costs": lambda: measure_costs(setting, args.rounds, args.nprobe),
        "simulation": lambda: simulate(setting, results, args.nprobe, args.network_gbit * 1e9 / 8),
    }
    for part in args.parts or PARTS:
        results[part] = steps[part]()
        write_json(output, results)
        print(part, json.dumps(results[part], indent=1), flush=True)


if __name__ == "__main__":
    main()
