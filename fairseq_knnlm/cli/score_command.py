"""``knnlm score``: log-probabilities and perplexity of raw text."""

import argparse
import logging
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KnnlmError
from ..progress import progress, say
from ..report.tables import table
from ..storage import to_json
from .model_flags import add_model_arguments, hint, load
from .parsing import Add, CommandParser

if TYPE_CHECKING:
    from ..mixture.scoring import TokenScores
    from ..mixture.text import TextScorer

logger = logging.getLogger(__name__)

LINES_PER_PART = 64
LOG_BASE = {"log_base": "e"}  # of every log-probability that is printed


def add_score_command(add: Add) -> None:
    add("score", score, "log-probabilities and perplexity of raw text, line by line", fill=_add_score_arguments)


def _add_score_arguments(parser: CommandParser) -> None:
    add_model_arguments(parser, "--knn-datastore", required=False)
    parser.add_argument("file", nargs="?", metavar="FILE", help="text, a line at a time (default: standard input)")
    parser.add_argument("--json", action="store_true", help="JSON lines, the last one with the totals")
    parser.add_argument("--tokens", action="store_true", help="with --json: also what every single token gets")


def score(args: argparse.Namespace) -> int:
    from ..data.characters import is_character_level
    from ..data.text_counts import TextCounts
    from ..mixture.text import describe_unknown

    if args.tokens and not args.json:
        raise KnnlmError("--tokens goes with --json; add that")
    lines = _read_lines(args.file)
    scorer = load(args)
    rows, totals = [], {"lines": 0, "tokens": 0, "unknown": 0, "words": 0, "bytes": 0, "lm": 0.0, "mixture": 0.0}
    group: list[tuple[int, str]] = []

    def flush() -> None:
        for row in _score_lines(scorer, group, args.tokens):
            for name in totals:
                totals[name] += row[name]
            if args.json:
                own = {name: row[name] for name in ("text", "token_scores") if name in row}
                say(to_json({**_with_perplexity(row), **own}), sys.stdout)
            else:
                rows.append(row)
        group.clear()

    with progress("scoring", len(lines) if isinstance(lines, list) else 0, " lines") as bar:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                group.append((number, line.rstrip("\n")))
            if len(group) == LINES_PER_PART:
                flush()
            bar.update()
        if group:
            flush()
    if not totals["tokens"]:
        raise KnnlmError("there is no text to score; give a file or standard input with at least one word")
    if warning := describe_unknown(int(totals["unknown"]), int(totals["tokens"] - totals["lines"])):
        logger.warning(warning)
    bits = {}
    if is_character_level(scorer.dictionary):
        bits = {"bits_per_character": round(-totals["mixture"] / totals["tokens"] / math.log(2), 4)}
    counts = TextCounts(totals["words"], totals["bytes"]) if scorer.text.has_own_tokenizer else None
    if counts is not None:
        for name in ("lm", "mixture"):
            bits[f"{name}_per_word"] = round(counts.per_word(totals[name]), 4)
            bits[f"{name}_bits_per_byte"] = round(counts.bits_per_byte(totals[name]), 4)
    if args.json:
        print(to_json({"total": {**_with_perplexity(totals), **bits}}))
        hint(_perplexity(totals, "lm"), _perplexity(totals, "mixture"))
        return 0
    knn = bool(scorer.memories)
    header = ["line", "tokens", "unknown", "log p LM", "ppl LM"]
    header += ["log p kNN-LM", "ppl kNN-LM", "text"] if knn else ["text"]
    cells = [[str(row["line"]), *_cells(row, knn), _shorten(row["text"])] for row in rows]
    print(table(header, [*cells, ["total", *_cells(totals, knn), ""]], left=("text",)))
    if counts is not None:
        print("\n" + counts.sentence(totals))
    elif bits:
        print(f"\nbits per character: {bits['bits_per_character']}")
    hint(_perplexity(totals, "lm"), _perplexity(totals, "mixture"))
    return 0


def _read_lines(file: str | None) -> Iterable[str]:
    if file is None:
        return sys.stdin
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KnnlmError(f"{file} cannot be read as text ({error}); give a UTF-8 file") from error


def _score_lines(scorer: "TextScorer", lines: list[tuple[int, str]], with_tokens: bool) -> list[dict]:
    sequences = [scorer.text.encode(line) for _, line in lines]
    scored = scorer.score(sequences)
    rows: list[dict] = []
    start = 0
    for (number, line), sequence in zip(lines, sequences):
        own = slice(start, start + len(sequence))
        start += len(sequence)
        rows.append(
            {
                "line": number,
                "lines": 1,
                "tokens": len(sequence),
                "unknown": sequence.count(scorer.dictionary.unk()),
                "words": len(line.split()),
                "bytes": len(line.encode()) + 1,  # with its end
                "lm": scored.lm[own].double().sum().item(),
                "mixture": scored.mixture[own].double().sum().item(),
                "text": line,
            }
        )
        if with_tokens:
            rows[-1]["token_scores"] = _token_scores(scorer, scored, own)
    return rows


def _token_scores(scorer: "TextScorer", scored: "TokenScores", own: slice) -> list[dict]:
    """Of each token of a line: what the LM, the memories and the mixture say of it."""
    facts = []
    for place in range(own.start, own.stop):
        facts.append(
            {
                "token": scorer.text.show(int(scored.tokens[place])),
                "lm": round(scored.lm[place].item(), 4),
                "mixture": round(scored.mixture[place].item(), 4),
                "memories": [round(memory[place].item(), 4) for memory in scored.memories],
            }
        )
        if scored.weights is not None:
            facts[-1]["weights"] = [round(weight, 6) for weight in scored.weights[place].tolist()]
    return facts


def _with_perplexity(row: dict) -> dict:
    result = {name: row[name] for name in ("line", "tokens", "unknown") if name in row} | LOG_BASE
    for name in ("lm", "mixture"):
        result[name] = {"log_prob": round(row[name], 4), "perplexity": round(_perplexity(row, name), 4)}
    return result


def _perplexity(row: dict, name: str) -> float:
    from ..mixture.interpolation import perplexity

    return perplexity(row[name] / row["tokens"])


def _cells(row: dict, knn: bool) -> list[str]:
    cells = [str(row["tokens"]), str(row["unknown"])]
    for name in ("lm", "mixture") if knn else ("lm",):
        cells += [f"{row[name]:.2f}", f"{_perplexity(row, name):.2f}"]
    return cells


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
