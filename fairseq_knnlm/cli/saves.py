"""Commands for saved runs: tune and sweep."""

import argparse
from dataclasses import asdict

from ..errors import KnnlmError
from ..saved_runs.sweeps import KNOBS
from ..storage import to_json
from .datastores import Add


def add_save_commands(add: Add) -> None:
    tune = add("tune", _tune, "find the best lambda, temperature, k and cache for a save of fairseq-eval-lm --knn-save")
    tune.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    tune.add_argument("--report", metavar="DIR", nargs="+", help="a save of other text to report the settings on")
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
    sweep.add_argument("--best-lambda", action="store_true", help="choose the best weights at each point")
    sweep.add_argument(
        "-o", "--output", metavar="FILE", nargs="+", default=[], help="also write .csv, .json, .svg or .png files"
    )


def _tune(args: argparse.Namespace) -> int:
    from ..report.tables import table
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.settings import Result, Settings, evaluate
    from ..saved_runs.tuning import check_not_test, check_report, tune

    saved = SavedScores.open(args.saves, tuple(args.without))
    check_not_test(saved)
    if not saved.run.memories:
        raise KnnlmError(
            f"{args.saves[0]} holds the bare LM, so there is nothing to tune; score with --knn-datastore or "
            "--knn-cache-size"
        )
    report = SavedScores.open(args.report, tuple(args.without)) if args.report else None
    if report:
        check_report(saved, report)
    settings = tune(saved)
    split = saved.run.source["split"]
    results = {
        f"{split}, as scored": evaluate(saved, Settings.of_run(saved)),
        f"{split}, tuned on it": evaluate(saved, settings),
    }
    if report:
        results[f"{report.run.source['split']}, report"] = evaluate(report, settings)
    flags = settings.flags(saved)
    if args.json:
        print(to_json({"flags": flags, **asdict(settings), "results": {n: asdict(r) for n, r in results.items()}}))
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


def _sweep(args: argparse.Namespace) -> int:
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.settings import Settings
    from ..saved_runs.sweep_files import check_outputs, sweep_table, write_sweep
    from ..saved_runs.sweeps import check_saved, set_knob, sweep

    if args.over not in KNOBS:
        raise KnnlmError(f"there is no knob {args.over}; choose one of {', '.join(KNOBS)}")
    check_outputs(args.output)
    saved = SavedScores.open(args.saves)
    settings = Settings.of_run(saved)
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
    rows = sweep(saved, args.over, values, settings, args.best_lambda)
    print(sweep_table(args.over, rows, args.best_lambda))
    for file in args.output:
        write_sweep(file, args.over, rows)
    return 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise KnnlmError(f"'{text}' is not a number") from error
