"""The ``knnlm`` command: what has no place in a fairseq command."""

import argparse
import json
import logging
import sys
from dataclasses import asdict

from . import __version__
from .analysis.sweep import KNOBS
from .errors import KnnlmError
from .spalm.analysis_commands import add_spalm_commands
from .spalm.commands import add_neighbors_arguments, neighbors
from .text_commands import add_inspect_arguments, add_score_arguments, inspect, score


def main(arguments: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except KnnlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="knnlm", description="Datastores and indexes of nearest-neighbour LMs.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run)
        return command

    build = add("build", _build, "build an index for a datastore (an interrupted build resumes)")
    build.add_argument("datastore", metavar="DIR")
    build.add_argument(
        "--index", default="auto", metavar="SPEC",
        help="auto (a good choice for the size), paper (IVF4096, 64-byte PQ), flat, or a FAISS factory string",
    )  # fmt: skip
    build.add_argument("--metric", choices=["l2", "ip"], default="l2")
    build.add_argument("--name", help="name of the index (default: from SPEC and metric)")
    build.add_argument("--force", action="store_true", help="build again what is there already")
    build.add_argument("--seed", type=int, default=1, help="of the training sample and the clusters")

    info = add("info", _info, "describe a datastore and its indexes")
    info.add_argument("datastore", metavar="DIR")
    info.add_argument("--json", action="store_true", help="for machines")

    verify = add("verify", _verify, "compare a datastore and its indexes with their checksums and with each other")
    verify.add_argument("datastore", metavar="DIR")

    part = add("subsample", _subsample, "copy a random part of a datastore to a datastore of its own")
    part.add_argument("datastore", metavar="DIR")
    part.add_argument("--fraction", type=float, required=True, help="of the entries, above 0 and at most 1")
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("-o", "--output", required=True, metavar="DIR", help="the datastore to create")

    tune = add("tune", _tune, "find the best lambda, temperature, k and cache for a save of fairseq-eval-lm --knn-save")
    tune.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    tune.add_argument("--report", metavar="DIR", nargs="+", help="a save of other text to report the choice on")
    tune.add_argument(
        "--without", metavar="MEMORY", action="append", default=[],
        help="leave one out of the mixture: knn0, knn1, ... or cache",
    )  # fmt: skip
    tune.add_argument("--json", action="store_true", help="for machines")

    sweep = add("sweep", _sweep, "vary one knob over a save of fairseq-eval-lm --knn-save")
    sweep.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    sweep.add_argument("--over", required=True, metavar="KNOB", help=f"one of {', '.join(KNOBS)}")
    sweep.add_argument("--values", metavar="A,B,...", help="where to evaluate (default: a grid that shows the curve)")
    for knob in KNOBS:
        sweep.add_argument(f"--{knob}", metavar="X", help="fix it here (default: as in the saved run)")
    sweep.add_argument("--best-lambda", action="store_true", help="choose the weights anew at each point")
    sweep.add_argument(
        "-o", "--output", metavar="FILE", nargs="+", default=[], help="also write .csv, .json, .svg or .png files"
    )

    near = add("neighbors", neighbors, "the table that SPALM reads: the retrieved tokens of every token of a split")
    add_neighbors_arguments(near)
    spalm = add("spalm", None, "what a trained SPALM does with its memory: gates, neighbours, gains, K")
    add_spalm_commands(spalm)

    score_ = add("score", score, "log-probabilities and perplexity of raw text, line by line")
    inspect_ = add("inspect", inspect, "a page that shows what was retrieved for each token of a text")
    add_score_arguments(score_)
    add_inspect_arguments(inspect_)

    adopt = add("import", _import, "adopt the memory maps and the index that the original implementation writes")
    adopt.add_argument("prefix", help="of PREFIX_keys.npy and PREFIX_vals.npy")
    adopt.add_argument("-o", "--output", required=True, metavar="DIR", help="the datastore to create")
    adopt.add_argument("--dict", required=True, metavar="FILE", help="dict.txt of the data it was made from")
    adopt.add_argument("--index", metavar="FILE", help="its FAISS index, which also tells its size")
    adopt.add_argument("--dim", type=int, help="dimension of the keys, where the files do not tell")
    adopt.add_argument("--size", type=int, help="number of entries, where the files do not tell")
    adopt.add_argument("--key", default="ffn_input_ln", help="which state the keys are (default: %(default)s)")
    adopt.add_argument("--layer", type=int, default=-1, help="of which layer (default: the last)")
    return parser


def _build(args) -> int:
    from .datastore import Datastore
    from .index import build_index, index_name, list_indexes

    datastore = Datastore(args.datastore)
    name = args.name or index_name(args.index, args.metric)
    for info in list_indexes(datastore):
        same = (info.spec, info.metric, info.keys_fingerprint) == (args.index, args.metric, datastore.fingerprint)
        if info.name == name and same and not args.force:
            print(f"the index {name} is there already; --force builds it again")
            return 0
    build_index(datastore, args.index, args.metric, name, args.seed)
    return 0


def _info(args) -> int:
    from .datastore import Datastore
    from .files import human_bytes
    from .index import list_indexes

    datastore = Datastore(args.datastore)
    manifest, indexes = datastore.manifest, list_indexes(datastore)
    if args.json:
        content = asdict(manifest)
        content["bytes"] = datastore.bytes_on_disk
        content["indexes"] = [asdict(index) for index in indexes]
        print(json.dumps(content, indent=1))
        return 0
    rows = [
        ("entries", f"{len(datastore):,}"),
        ("keys", f"{manifest.dim} x {manifest.key_dtype}, {manifest.key} of layer {manifest.layer}"),
        ("values", manifest.value_dtype),
        ("on disk", f"{human_bytes(datastore.bytes_on_disk)} in {len(manifest.shards)} shards"),
        *((name.replace("_", " "), str(value)) for name, value in manifest.source.items()),
    ]
    for index in indexes:
        size = f", {human_bytes(index.bytes)}, built in {index.seconds:.0f}s" if index.factory else ""
        rows.append((f"index {index.name}", f"{index.factory or 'flat'}, {index.metric}{size}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _verify(args) -> int:
    from tqdm import tqdm

    from .datastore import Datastore
    from .verify import verify

    datastore = Datastore(args.datastore)
    problems = 0
    with tqdm(total=2 * len(datastore.shards) + 2, unit="file", leave=False) as bar:
        for check in verify(datastore):
            bar.update()
            if check.problem:
                problems += 1
                tqdm.write(f"error: {check.what}: {check.problem}", file=sys.stderr)
            elif not check.what.endswith(".npy"):
                tqdm.write(f"ok: {check.what}", file=sys.stdout)
    print(f"{args.datastore}: {f'{problems} problems' if problems else 'all is well'}")
    return 1 if problems else 0


def _subsample(args) -> int:
    from .datastore import Datastore
    from .subsample import subsample

    datastore = subsample(Datastore(args.datastore), args.fraction, args.seed, args.output)
    print(f"{args.output}: {len(datastore):,} entries; its index is built when it is used, or by knnlm build")
    return 0


def _tune(args) -> int:
    from .analysis.choice import Choice, Result, evaluate
    from .analysis.evidence import Evidence
    from .analysis.report import table
    from .analysis.tune import check_not_test, check_report, tune

    evidence = Evidence.open(args.saves, tuple(args.without))
    check_not_test(evidence)
    if not evidence.run.memories:
        raise KnnlmError(
            f"{args.saves[0]} holds the bare LM, so there is nothing to tune; score with --knn-datastore or "
            "--knn-cache-size"
        )
    report = Evidence.open(args.report, tuple(args.without)) if args.report else None
    if report:
        check_report(evidence, report)
    choice = tune(evidence)
    split = evidence.run.source["split"]
    results = {
        f"{split}, as scored": evaluate(evidence, Choice.of_run(evidence)),
        f"{split}, tuned on it": evaluate(evidence, choice),
    }
    if report:
        results[f"{report.run.source['split']}, report"] = evaluate(report, choice)
    flags = choice.flags(evidence)
    if args.json:
        print(json.dumps({"flags": flags, **asdict(choice), "results": {n: asdict(r) for n, r in results.items()}}))
        return 0
    print(table(["", "tokens", *Result.HEADER], [[n, f"{r.tokens:,}", *r.cells()] for n, r in results.items()]))
    print(f"\n{flags}\n")
    if report:
        print("The last line is the one to report; the others are of the text that was tuned on.")
    else:
        expected = results[f"{split}, tuned on it"].mixture
        print(
            f"Scoring {split} with these flags gives a perplexity of {expected:.4f}. That is no test result: to\n"
            "report one, score another split with them, or give its save to --report."
        )
    return 0


def _sweep(args) -> int:
    from .analysis.choice import Choice
    from .analysis.evidence import Evidence
    from .analysis.report import check_outputs, sweep_table, write_sweep
    from .analysis.sweep import check_saved, set_knob, sweep

    if args.over not in KNOBS:
        raise KnnlmError(f"there is no knob {args.over}; choose one of {', '.join(KNOBS)}")
    check_outputs(args.output)
    evidence = Evidence.open(args.saves)
    choice = Choice.of_run(evidence)
    for knob in KNOBS:
        fixed = getattr(args, knob.replace("-", "_"))
        if args.best_lambda and knob.endswith("lambda") and (fixed is not None or knob == args.over):
            raise KnnlmError(f"--best-lambda chooses every {knob} itself; leave out one of the two")
        if fixed is not None:
            if knob == args.over:
                raise KnnlmError(f"--{knob} would fix what is swept over; leave it out, or use --values")
            check_saved(evidence, knob)
            choice = set_knob(evidence, choice, knob, _number(fixed))
    values = [_number(value) for value in args.values.split(",")] if args.values else None
    rows = sweep(evidence, args.over, values, choice, args.best_lambda)
    print(sweep_table(args.over, rows, args.best_lambda))
    for file in args.output:
        write_sweep(file, args.over, rows)
    return 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise KnnlmError(f"'{text}' is not a number") from error


def _import(args) -> int:
    from .importer import import_datastore
    from .keys import KEYS

    if args.key not in KEYS:
        raise KnnlmError(f"--key {args.key} is unknown; choose one of {', '.join(KEYS)}")
    datastore = import_datastore(
        args.prefix, args.output, _read_dictionary(args.dict), args.key, args.layer, args.dim, args.size, args.index
    )
    print(f"{args.output}: {len(datastore):,} entries imported")
    return 0


def _read_dictionary(path: str) -> dict:
    from fairseq.data import Dictionary

    from .task import dictionary_facts

    try:
        return dictionary_facts(Dictionary.load(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise KnnlmError(f"{path} is not a fairseq dictionary ({error}); give the dict.txt of the data") from error


if __name__ == "__main__":
    sys.exit(main())
