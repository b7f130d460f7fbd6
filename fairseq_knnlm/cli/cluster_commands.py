"""``knnlm cluster``: dump and build with the nodes of a Ray cluster, and what they are."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KnnlmError, resumable
from ..report.tables import table
from ..storage import human_bytes, to_json
from .parsing import CommandParser

if TYPE_CHECKING:
    from ..cluster.nodes import Node

logger = logging.getLogger(__name__)


def add_cluster_commands(parser: CommandParser) -> None:
    commands = parser.add_subparsers(dest="cluster_command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, help: str) -> CommandParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run, parser=command, light=False)
        command.add_argument(
            "--ray-address", default="auto", metavar="ADDRESS",
            help="auto (the cluster that this machine belongs to), HOST:PORT of its head, or local (this machine "
            "alone) (default: %(default)s)",
        )  # fmt: skip
        return command

    status = add("status", _status, "the nodes: memory, actors, versions, and whether they see a datastore")
    status.add_argument("folder", nargs="?", metavar="DIR", help="a datastore that every node should have")
    status.add_argument("--index", metavar="NAME", help="compare this index of it, too")
    status.add_argument("--json", action="store_true", help="for machines")

    dump = add("dump", _dump, "dump a datastore with all nodes; what is behind -- are arguments of fairseq-eval-lm")
    dump.add_argument("--jobs", type=int, metavar="N", help="parts of the dump (default: four for every node)")
    dump.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="-- DATA --path CHECKPOINT --knn-dump DIR ...",
        help="as for fairseq-eval-lm, without --user-dir, --task, --num-shards and --shard-id",
    )  # fmt: skip

    build = add("build", _build, "build an index with all nodes: the same bytes as knnlm build (it resumes likewise)")
    build.add_argument("datastore", metavar="DIR")
    build.add_argument("--index", default="auto", metavar="SPEC", help="as for knnlm build (default: %(default)s)")
    build.add_argument("--metric", choices=["l2", "ip"], default="l2")
    build.add_argument("--name", help="name of the index (default: from SPEC and metric)")
    build.add_argument("--force", action="store_true", help="build again what is there already")
    build.add_argument("--seed", type=int, default=1, help="of the training sample and the clusters")


def _connect(address: str) -> tuple[Any, list["Node"]]:
    from ..cluster.connection import connect
    from ..cluster.nodes import check_software, living_nodes, probe

    ray = connect(address)
    nodes = living_nodes(ray)
    probe(ray, nodes)
    check_software(nodes, ray.__version__)
    return ray, nodes


def _build(args: argparse.Namespace) -> int:
    from ..cluster.list_building import ListBuilder
    from ..datastore import Datastore
    from ..index import build_index

    datastore = Datastore(args.datastore)
    ray, nodes = _connect(args.ray_address)
    logger.info(f"{len(nodes)} nodes write the lists; centroids are trained here")
    builder = ListBuilder(ray, nodes)
    build_index(datastore, args.index, args.metric, args.name, args.seed, args.force, write_lists=builder)
    return 0


def _dump(args: argparse.Namespace) -> int:
    from ..cluster.dumping_jobs import dump, dump_folder

    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    folder = dump_folder(arguments)
    ray, nodes = _connect(args.ray_address)
    with resumable("run the same command again: what is dumped stays"):
        manifest = dump(ray, nodes, arguments, args.jobs)
    print(f"{folder}: {manifest.entries:,} entries, dumped by {len(nodes)} nodes")
    return 0


def _status(args: argparse.Namespace) -> int:
    from ..cluster.connection import connect
    from ..cluster.nodes import living_nodes, probe

    if args.index and not args.folder:
        raise KnnlmError("--index names an index of a datastore; give its DIR, too")
    ray = connect(args.ray_address)
    nodes = living_nodes(ray)
    probe(ray, nodes, Path(args.folder) if args.folder else None, args.index)
    actors = _actors(ray)
    rows = [_row(node, actors.get(node.id, []), args.folder, args.index) for node in nodes]
    if args.json:
        print(to_json({"nodes": rows}, indent=1))
        return 0
    shown = [
        [
            row["name"], f"{row['processors']:g}", str(row["gpus"]), human_bytes(row["memory"]),
            str(len(row["actors"])), f"{row['python']}, {row['ray']}, {row['package'] or 'missing'}", row["datastore"],
        ]
        for row in rows
    ]  # fmt: skip
    header = ["node", "CPUs", "GPUs", "memory free", "actors", "Python, Ray, fairseq-knnlm", "datastore"]
    print(table(header, shown, left=("node", "datastore", "Python, Ray, fairseq-knnlm")))
    memory = human_bytes(sum(row["memory"] for row in rows))
    print(f"\n{len(rows)} nodes with {memory} of free memory in all")
    return 0 if all(row["datastore"] in ("", "same") for row in rows) else 1


def _actors(ray: Any) -> dict[str, list[str]]:
    """What our actors serve, by the node that they live on."""
    from ..cluster.connection import NAMESPACE

    found: dict[str, list[str]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            node, _, what = actor["name"].partition(" ")
            found.setdefault(node, []).append(what.rpartition(" ")[0])
    return found


def _row(node: "Node", actors: list[str], folder: str | None, index: str | None) -> dict[str, Any]:
    """Of one node what a person or a program wants to know."""
    from ..cluster.node_facts import datastore_facts

    seen = ""
    if folder is not None:
        here = datastore_facts(Path(folder), index)
        same = all(node.facts.get(what) == here.get(what) for what in ("keys", "index"))
        seen = node.facts.get("problem") or ("same" if same else "differs from the one here")
    facts = {name: node.facts.get(name) for name in ("python", "ray", "package")}
    return {
        "name": node.name, "processors": node.processors, "gpus": node.gpus, "memory": node.memory,
        "actors": actors, **facts, "datastore": seen,
    }  # fmt: skip
