"""``knnlm neighbors``: the table that SPALM reads."""

import argparse
import logging
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from ..errors import KnnlmError
from .parsing import Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..datastore import Datastore
    from ..search import Search

logger = logging.getLogger(__name__)


def add_neighbors_command(add_command: Add) -> None:
    help = "the table that SPALM reads: the retrieved tokens of every token of a split"
    add = add_command("neighbors", neighbors, help).add_argument
    add("--datastore", required=True, metavar="DIR", help="where to look")
    add("--queries", required=True, metavar="DIR", help="a datastore of the split (--knn-dump)")
    add("--k", type=int, default=4, help="neighbours per token (default: %(default)s)")
    add(
        "--window", type=int,
        help="leave out a token's own entry and those within so many positions (default: a sequence length where the "
        "queries are the datastore's own text or a part of it, which is found by itself, else none)",
    )  # fmt: skip
    add("--index", metavar="SPEC", help="(default: auto, or the only one there is)")
    add("--metric", choices=["l2", "ip"], default="l2")
    add(
        "--nprobe", type=int, default=8,
        help="clusters visited (default: %(default)s; the few nearest are found in fewer than kNN-LM's many)",
    )  # fmt: skip
    add("--engine", choices=["local", "ray"], default="local", help="who searches (default: %(default)s)")
    add("--ray-address", default="auto", metavar="ADDRESS", help="auto, HOST:PORT or local (default: %(default)s)")
    add("--num-shards", type=int, default=1, help="do one contiguous part of the work, see --shard-id")
    add("--shard-id", type=int, default=0)
    add("-o", "--output", metavar="DIR", help="the table; an interrupted one is continued")
    add(
        "--recall", type=int, metavar="N",
        help="make no table, but search N random queries exactly and with nprobe 4 to 64, and print what each finds",
    )  # fmt: skip
    add("--json", action="store_true", help="print what --recall measures as JSON")


def neighbors(args: argparse.Namespace) -> int:
    from ..data.neighbor_table import NeighborTable, is_complete
    from ..data.parts import contiguous_part
    from ..datastore import Datastore
    from ..index import build_index_if_missing
    from ..memory.engines import RayCluster, make_engine
    from ..memory.neighbor_search import make_neighbors

    datastore, queries = Datastore(args.datastore), Datastore(args.queries)
    check_same_model(datastore, queries)
    if args.nprobe < 1:
        raise KnnlmError(f"--nprobe must be 1 or more, not {args.nprobe}")
    if args.engine == "local" and args.ray_address != "auto":
        raise KnnlmError("--ray-address does nothing without --engine ray; add that, or leave it out")
    cluster = RayCluster(args.ray_address) if args.engine == "ray" else None
    if cluster is not None:
        cluster.check("index", "exact")
    _check_output(args)
    part = contiguous_part(len(queries.shards), args.num_shards, args.shard_id)
    info = build_index_if_missing(datastore, args.index, args.metric)

    def engine_of(nprobe: int) -> "Search":
        return make_engine(datastore, info, args.k, args.metric, "index", "exact", nprobe, cluster=cluster)

    if args.recall is not None:
        return _print_recall(args, datastore, queries, engine_of)
    engine = engine_of(args.nprobe)
    search = {"metric": args.metric, "index": info.name, "nprobe": args.nprobe}
    started, processor = time.perf_counter(), sum(os.times()[:2])
    done = make_neighbors(args.output, datastore, queries, engine, args.k, search, args.window, part)
    if done:
        seconds, processor = time.perf_counter() - started, sum(os.times()[:2]) - processor
        per_million = 1e6 * processor / done
        print(
            f"{args.output}: {done:,} tokens in {seconds:.0f} s; {per_million:,.0f} processor seconds for a million "
            f"tokens, at the same cost {110 * per_million / 3600:,.1f} processor hours for 110 million of them"
        )
    else:
        print(f"{args.output}: this part is done already")
    if is_complete(args.output):
        print(describe_shares(NeighborTable(args.output).shares_of_target()))
    return 0


def _check_output(args: argparse.Namespace) -> None:
    if (args.recall is None) == (args.output is None):
        raise KnnlmError("give -o DIR for the table, or --recall N to measure what a search finds; one of them")
    if args.recall is not None and args.recall < 1:
        raise KnnlmError(f"--recall must be 1 or more, not {args.recall}")
    if args.json and args.recall is None:
        raise KnnlmError("--json goes with --recall; leave it out")


def _print_recall(
    args: argparse.Namespace, datastore: "Datastore", queries: "Datastore", engine_of: "Callable[[int], Search]"
) -> int:
    import json

    from ..memory.neighbor_recall import measure_recall
    from ..report.tables import table

    found = measure_recall(datastore, queries, engine_of, args.k, args.metric, args.window, args.recall)
    if args.json:
        print(json.dumps([row.as_dict() for row in found]))
        return 0
    header = [
        "nprobe", "nearest found", f"of the {args.k} found", "first is the token", f"one of {args.k} is",
        "processor s per million",
    ]  # fmt: skip
    rows = [
        ["all keys" if row.nprobe is None else str(row.nprobe), f"{row.first:.4f}", f"{row.among_k:.4f}",
         f"{row.right_first:.4f}", f"{row.right_among_k:.4f}", f"{row.seconds_per_million:,.0f}"]
        for row in found
    ]  # fmt: skip
    print(table(header, rows))
    sample = min(args.recall, len(queries))
    print(f"\n{sample:,} of {len(queries):,} queries; more of them at once take less time each, as in a table")
    return 0


def check_same_model(datastore: "Datastore", queries: "Datastore") -> None:
    ours, theirs = datastore.manifest, queries.manifest
    # An imported datastore may say -1, the last layer, since nothing told its number.
    unknown = min(ours.layer, theirs.layer) < 0 and ours.layer != theirs.layer
    if unknown:
        logger.warning(
            f"warning: {datastore.folder} says layer {ours.layer} and {queries.folder} layer {theirs.layer}, which "
            "cannot be compared; import with --path to know the number"
        )
    same = ours.key == theirs.key and (ours.layer == theirs.layer or unknown)
    comparable = theirs.projection == ours.projection or (theirs.projection is None and theirs.dim == ours.source_dim)
    if queries.manifest.source_dim != datastore.manifest.source_dim or not same:
        raise KnnlmError(
            f"{queries.folder} holds {theirs.key} of layer {theirs.layer} with {queries.dim} dimensions, "
            f"{datastore.folder} {ours.key} of layer {ours.layer} with {datastore.dim}; dump both with the same model "
            "and --knn-key"
        )
    if not comparable:
        raise KnnlmError(
            f"{queries.folder} holds keys that were projected in another way than those of {datastore.folder}; dump "
            "the queries without --knn-key-dim"
        )
    for fact, what in (("checkpoint_sha256", "checkpoint"), ("dictionary_sha256", "dictionary")):
        if None not in (facts := {ours.source.get(fact), theirs.source.get(fact)}) and len(facts) > 1:
            raise KnnlmError(
                f"{queries.folder} and {datastore.folder} were made with another {what}; dump both with the same one"
            )


def describe_shares(shares: np.ndarray) -> str:
    """A sentence about ``NeighborTable.shares_of_target``."""
    numbers = ", ".join(f"{share:.1%} (K = {k})" for k, share in enumerate(shares, start=1) if k & (k - 1) == 0)
    return f"the token itself is the first neighbour of {shares[0]:.1%} of positions; among the first K: {numbers}"
