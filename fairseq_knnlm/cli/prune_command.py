"""``knnlm prune``: keep the entries that a datastore needs."""

import argparse

from .neighbors_command import check_same_model
from .parsing import Add

METHODS = ("random", "merge", "average", "retrieved", "learned")


def add_prune_command(add_command: Add) -> None:
    help = "copy the entries that a datastore needs, with weights, to a datastore of its own"
    add = add_command("prune", _prune, help).add_argument
    add("datastore", metavar="DIR")
    add("--keep", type=float, required=True, metavar="SHARE", help="of the entries, above 0 and at most 1")
    add(
        "--method", default="average", choices=METHODS,
        help="random; merge near entries with the same value into one of them; or into the average of their keys; keep "
        "those that are retrieved with the right value; or learn a sparse posterior (default: %(default)s)",
    )  # fmt: skip
    add("-o", "--output", required=True, metavar="DIR", help="the datastore to create")
    add("--seed", type=int, default=1, help="of what is drawn, and of who stays of equals (default: %(default)s)")
    add(
        "--neighbors", type=int, metavar="K",
        help="of merge: merge with one of the K nearest only (default: with any of the list); of retrieved: so many "
        "nearest are retrieved (default: 32)",
    )  # fmt: skip
    add(
        "--queries", metavar="DIR",
        help="of retrieved and learned: a datastore of the text that has to be predicted (default: the entries "
        "themselves, each by others)",
    )  # fmt: skip
    add(
        "--window", type=int, metavar="N",
        help="of retrieved and learned: entries within so many positions of a query are left out (default: a sequence "
        "length where the queries are the datastore's own text)",
    )  # fmt: skip
    add("--alpha", type=float, help="of learned: of the Dirichlet prior; below 1 it is sparse (default: 0.2)")
    add("--updates", type=int, metavar="N", help="of learned: of the posterior (default: 10)")
    add("--temperature", type=float, help="of learned: of the distances (default: as measured for the index)")
    add("--no-weights", action="store_true", help="of merge, average and learned: copy the entries without weights")
    add("--index", metavar="SPEC", help="whose lists are looked at (default: auto)")


def _prune(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..pruning import PruneOptions, prune

    datastore = Datastore(args.datastore)
    queries = None
    if args.queries is not None:
        queries = Datastore(args.queries)
        check_same_model(datastore, queries)
    options = PruneOptions(
        args.keep, args.method, args.seed, args.neighbors, queries, args.window, args.alpha, args.updates,
        args.temperature, False if args.no_weights else None, args.index,
    )  # fmt: skip
    pruned = prune(datastore, options, args.output)
    weights = "" if pruned.weights is None else f" that count {float(pruned.weights.sum(dtype=float)):,.0f} together"
    print(
        f"{args.output}: {len(pruned):,} of {len(datastore):,} entries{weights}; its index is built when it is used, "
        "or by knnlm build"
    )
    return 0
