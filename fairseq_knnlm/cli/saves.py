"""Commands for saved runs: tune, sweep and mix."""

import argparse
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..errors import KnnlmError
from ..near_matches import did_you_mean
from ..progress import progress
from ..saved_runs import KNOBS
from ..storage import to_json
from .parsing import Add

if TYPE_CHECKING:
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.settings import Settings

logger = logging.getLogger(__name__)


def add_save_commands(add: Add) -> None:
    tune = add("tune", _tune, "find the best lambda, temperature, k and cache for a save of fairseq-eval-lm --knn-save")
    tune.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    tune.add_argument("--report", metavar="DIR", nargs="+", help="a save of other text to report the settings on")
    tune.add_argument(
        "--without", metavar="MEMORY", action="append", default=[],
        help="leave one out of the mixture: knn0, knn1, ..., head0, ... or cache",
    )  # fmt: skip
    tune.add_argument(
        "--keep", action="store_true",
        help="store the values in the datastore: whoever scores, generates or looks with this mixture then has them",
    )  # fmt: skip
    tune.add_argument(
        "--datastore", "--knn-datastore", metavar="DIR[,DIR...]",
        help="of --keep: where the datastores are now (default: where the run found them)",
    )  # fmt: skip
    tune.add_argument("--json", action="store_true", help="for machines")

    sweep = add("sweep", _sweep, "vary one knob over a save of fairseq-eval-lm --knn-save")
    sweep.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    sweep.add_argument("--over", required=True, metavar="KNOB", help=f"one of {', '.join(KNOBS)}")
    sweep.add_argument("--values", metavar="A,B,...", help="where to evaluate (default: a grid that shows the curve)")
    for knob in KNOBS:
        sweep.add_argument(f"--{knob}", metavar="X", help="fix it here (default: as kept by knnlm tune, else as saved)")
    sweep.add_argument("--best-lambda", action="store_true", help="choose the best weights at each point")
    sweep.add_argument(
        "-o", "--output", metavar="FILE", nargs="+", default=[], help="also write .csv, .json, .svg or .png files"
    )

    mix = add("mix", _mix, "find the best constant weights of several saves of one text: LMs and their memories")
    mix.add_argument(
        "saves", metavar="DIR", nargs="+", help="two or more saves of the same tokens; parts of one run with commas"
    )
    mix.add_argument("--report", metavar="DIR", nargs="+", help="as many saves of other text to report the weights on")
    mix.add_argument("--json", action="store_true", help="for machines")


def _tune(args: argparse.Namespace) -> int:
    from ..report.tables import table
    from ..saved_runs.keeping import keep_settings
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.settings import Result, Settings, evaluate
    from ..saved_runs.tuning import Tally, check_not_test, check_report, tune

    if args.datastore and not args.keep:
        raise KnnlmError("--datastore says where --keep stores the values; add --keep, or leave it out")
    saved = SavedScores.open(args.saves, tuple(args.without))
    check_not_test(saved)
    if not saved.run.memories:
        raise KnnlmError(
            f"{args.saves[0]} holds the bare LM, so there is nothing to tune; score with --knn-datastore, "
            "--knn-head or --knn-cache-size"
        )
    report = SavedScores.open(args.report, tuple(args.without)) if args.report else None
    if report:
        check_report(saved, report)
    tally = Tally()
    with progress("tuning", 0):
        settings = tune(saved, tally)
    split = saved.run.source["split"]
    results = {
        f"{split}, as scored": evaluate(saved, Settings.of_run(saved)),
        f"{split}, tuned on it": evaluate(saved, settings),
    }
    if report:
        results[f"{report.run.source['split']}, report"] = evaluate(report, settings)
    flags, tuned = settings.flags(saved), results[f"{split}, tuned on it"].mixture
    kept = []
    if args.keep:
        folders = args.datastore.split(",") if args.datastore else None
        kept = [str(path) for path in keep_settings(saved, settings, tuned, tally.settings, folders)]
    if args.json:
        content = {"flags": flags, **asdict(settings), "results": {n: asdict(r) for n, r in results.items()}}
        one = settings.temperatures[0] if len(set(settings.temperatures)) == 1 else None  # the same for all datastores
        print(to_json({**content, "temperature": one, "settings": tally.settings, "kept": kept}))
        return 0
    print(table(["", "tokens", *Result.HEADER], [[n, f"{r.tokens:,}", *r.cells()] for n, r in results.items()]))
    for name, result in results.items():
        if result.words:
            print(f"per word, {name}: {result.lm_per_word:.2f} LM, {result.mixture_per_word:.2f} mixture")
    print(f"\n{flags}\n")
    if report:
        print("The last line is the one to report; the others are of the text that was tuned on.")
    else:
        print(
            f"Scoring {split} with these flags gives a perplexity of {tuned:.4f}. That is no test result: to\n"
            "report one, score another split with them, or give its save to --report."
        )
    for temperature, flag in _at_the_edge(saved, settings):
        print(f"The best temperature that was saved is the {temperature} one; score again with {flag} to look further.")
    if kept:
        print(f"Kept in {', '.join(kept)}: commands that are given no such flags use these values, and say so.")
    elif saved.knn_memories or saved.heads:
        where = "datastore" if saved.knn_memories else "head"
        print(f"With --keep these values are stored in the {where}, and later commands use them by themselves.")
    return 0


def _at_the_edge(saved: "SavedScores", settings: "Settings") -> list[tuple[str, str]]:
    """Where every visited entry took part: whether a best temperature is the lowest or the highest that was saved."""
    found = []
    for memory, temperature in zip(saved.knn_memories, settings.temperatures):
        grid = sorted(memory.temperatures or [])
        for name, edge in (("lowest", grid[:1]), ("highest", grid[-1:])):
            if edge and abs(edge[0] / temperature - 1) < 1e-3:
                found.append((name, f"--knn-temperature {temperature:g} --knn-save"))
    return found


def _sweep(args: argparse.Namespace) -> int:
    from ..saved_runs.keeping import kept_settings
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.settings import Settings
    from ..saved_runs.sweep_files import check_outputs, sweep_table, write_sweep
    from ..saved_runs.sweeps import check_saved, set_knob, sweep

    if args.over not in KNOBS:
        near = did_you_mean(args.over.removeprefix("--").removeprefix("knn-"), KNOBS)
        raise KnnlmError(f"there is no knob {args.over}; choose one of {', '.join(KNOBS)}{near}")
    check_outputs(args.output)
    saved = SavedScores.open(args.saves)
    settings = Settings.of_run(saved)
    if kept := kept_settings(saved):
        settings, origin = kept
        logger.info(f"{settings.flags(saved)} as {origin}, knnlm tune --keep; give --lambda and so on for others")
    for knob in KNOBS:
        fixed = getattr(args, knob.replace("-", "_"))
        if args.best_lambda and knob.endswith("lambda") and (fixed is not None or knob == args.over):
            raise KnnlmError(f"--best-lambda chooses every {knob} itself; leave out one of the two")
        if fixed is not None:
            if knob == args.over:
                raise KnnlmError(f"--{knob} would fix what is swept over; leave it out, or use --values")
            check_saved(saved, knob)
            settings = set_knob(saved, settings, knob, _number(fixed))
    values = [_number(value) for value in args.values.split(",")] if args.values else None
    with progress("sweeping", 0):
        rows = sweep(saved, args.over, values, settings, args.best_lambda)
    print(sweep_table(args.over, rows, args.best_lambda))
    for file in args.output:
        write_sweep(file, args.over, rows)
    return 0


def _mix(args: argparse.Namespace) -> int:
    from ..report.tables import table
    from ..saved_runs.joint import JointSaves, mix

    saves = JointSaves(args.saves)
    report = JointSaves(args.report) if args.report else None
    with progress("mixing", 0):
        weights, results = mix(saves, report)
    found = dict(zip(saves.labels, weights.tolist()))
    split = saves.saves[0].run.source["split"]
    names = [f"{split}, tuned on it", *(f"{other.saves[0].run.source['split']}, report" for other in [report] if other)]
    if args.json:
        print(to_json({"weights": found, "results": {n: asdict(r) for n, r in zip(names, results)}}))
        return 0
    print(table(["part", "weight"], [[name, f"{weight:.4f}"] for name, weight in found.items()]))
    header = ["perplexity", "tokens", *(f"LM of {name}" for name in saves.names), "mean of LMs", "mixture", "oracle"]
    rows = [
        [name, f"{r.tokens:,}", *(f"{number:.2f}" for number in (*r.alone, r.average, r.mixture, r.oracle))]
        for name, r in zip(names, results)
    ]
    print(f"\n{table(header, rows)}")
    if not report:
        print("\nThat is no test result: to report one, give saves of other text to --report.")
    return 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise KnnlmError(f"'{text}' is not a number") from error
