"""``knnlm gate``: learn weights by context from a saved run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KnnlmError
from ..progress import progress
from ..storage import to_json
from .parsing import Add

if TYPE_CHECKING:
    from ..saved_runs.gate_learning import GateResult


def add_gate_command(add: Add) -> None:
    gate = add("gate", _gate, "learn weights of LM and memories by context, from a save of fairseq-eval-lm --knn-save")
    gate.add_argument("saves", metavar="DIR", nargs="+", help="a save, or the --num-shards parts of one run")
    gate.add_argument("-o", "--output", metavar="GATE", required=True, help="the file to write, for --knn-gate")
    gate.add_argument("--report", metavar="DIR", nargs="+", help="a save of other text to report the gate on")
    gate.add_argument(
        "--without", metavar="MEMORY", action="append", default=[],
        help="leave one out of the mixture: knn0, knn1, ... or cache",
    )  # fmt: skip
    gate.add_argument("--seed", type=int, default=1, help="of the training (default: %(default)s)")
    gate.add_argument("--json", action="store_true", help="for machines")


def _gate(args: argparse.Namespace) -> int:
    from ..report.tables import table
    from ..saved_runs.gate_learning import learn_gate
    from ..saved_runs.scores import SavedScores
    from ..saved_runs.tuning import check_not_test, check_report

    output = Path(args.output)
    if output.is_dir():
        raise KnnlmError(f"{output} is a folder; give -o the name of a file")
    saved = SavedScores.open(args.saves, tuple(args.without))
    check_not_test(saved)
    if not saved.run.memories:
        raise KnnlmError(
            f"{args.saves[0]} holds the bare LM, so there is nothing to weigh; score with --knn-datastore or "
            "--knn-cache-size"
        )
    report = SavedScores.open(args.report, tuple(args.without)) if args.report else None
    if report:
        check_report(saved, report)
    with progress("learning", 0) as bar:
        result = learn_gate(saved, report, args.seed, lambda epoch, loss: bar.update(1))
    result.gate.write(output)
    if args.json:
        print(to_json({"gate": str(output), "flags": result.flags(str(output)), **result.facts()}))
        return 0
    print(table(["", "tokens", *result.HEADER], result.rows()))
    print()
    _explain(result, output)
    return 0


def _explain(result: "GateResult", output: Path) -> None:
    if not result.gate.facts.features:
        print(
            "What is known of a token's context did not help on the held-out part, so the gate keeps the constant "
            "weights;\na save of more text may give one that helps."
        )
    print(f"Written to {output}; use it with the same datastores and the flags\n\n{result.flags(str(output))}")
