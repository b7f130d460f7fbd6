"""``knnlm score`` and ``knnlm inspect``: commands that load a model and read raw text."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from enum import EnumMeta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from fairseq.data import data_utils

from ..data.characters import is_character_level
from ..errors import KnnlmError
from ..mixture.interpolation import perplexity
from ..mixture.text import TextScorer
from ..report.tables import table
from ..storage import to_json, write_text
from ..tasks.config import KNNLanguageModelingConfig
from ..tasks.loading import load_text_scorer
from .datastores import Add

if TYPE_CHECKING:
    from ..inspector.collect import Inspector

# The flags of the task that have a meaning here; their defaults and help are taken from there.
FLAGS = (
    "knn_index", "knn_k", "knn_lambda", "knn_temperature", "knn_nprobe", "knn_far", "knn_device", "knn_metric",
    "knn_mask", "knn_score",
)  # fmt: skip
LINES_PER_PART = 64


def add_arguments(parser: argparse.ArgumentParser, datastore_flag: str, required: bool) -> None:
    """What both commands need to load a model with its memories."""
    parser.add_argument("--path", required=True, metavar="CHECKPOINT")
    parser.add_argument("--data", required=True, metavar="DATA", help="folder with the model's dict.txt")
    parser.add_argument(
        datastore_flag, dest="knn_datastore", required=required, metavar="DIR[,DIR...]", help="datastores to mix in"
    )
    settings = {field.name: field for field in fields(KNNLanguageModelingConfig)}
    for name in FLAGS:
        field = settings[name]
        default = str(field.default) if field.default is not None else None
        kind = type(field.default) if isinstance(field.default, int | float) else str
        choices = [str(choice.value) for choice in field.type] if isinstance(field.type, EnumMeta) else None
        flag, text = f"--{name.replace('_', '-')}", field.metadata["help"]
        parser.add_argument(flag, type=kind, default=default, choices=choices, help=f"{text} (default: {default})")
    parser.add_argument("--tokenizer", choices=["moses"], help="tokenise the text first (default: it is tokenised)")
    parser.add_argument("--lang", default="en", help="of the tokenizer")


def load(args: argparse.Namespace) -> TextScorer:
    """The model and its memories, as the flags say."""
    config = KNNLanguageModelingConfig(data=args.data)
    for name in (*FLAGS, "knn_datastore"):
        setattr(config, name, getattr(args, name))
    return load_text_scorer(args.path, config)


def tokenizer(args: argparse.Namespace) -> Callable[[str], str]:
    if args.tokenizer is None:
        return lambda line: line
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=args.lang)
    return lambda line: moses.tokenize(line, aggressive_dash_splits=True, return_str=True, escape=False)


# --- score ----------------------------------------------------------------------------------------------------------


def add_text_commands(add: Add) -> None:
    _add_score_arguments(add("score", score, "log-probabilities and perplexity of raw text, line by line"))
    _add_inspect_arguments(
        add("inspect", inspect, "a page that shows what was retrieved for each token of a text")
    )


def _add_score_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--knn-datastore", required=False)
    parser.add_argument("file", nargs="?", metavar="FILE", help="text, a line at a time (default: standard input)")
    parser.add_argument("--json", action="store_true", help="JSON lines, the last one with the totals")


def score(args: argparse.Namespace) -> int:
    lines = _read_lines(args.file)
    scorer, tokenize = load(args), tokenizer(args)
    rows, totals = [], {"tokens": 0, "unknown": 0, "lm": 0.0, "mixture": 0.0}
    group: list[tuple[int, str]] = []

    def flush() -> None:
        for row in _score_lines(scorer, group, tokenize):
            for name in totals:
                totals[name] += row[name]
            if args.json:
                print(to_json({**_with_perplexity(row), "text": row["text"]}), flush=True)
            else:
                rows.append(row)
        group.clear()

    for number, line in enumerate(lines, start=1):
        if line.strip():
            group.append((number, line.rstrip("\n")))
        if len(group) == LINES_PER_PART:
            flush()
    if group:
        flush()
    if not totals["tokens"]:
        raise KnnlmError("there is no text to score; give a file or standard input with at least one word")
    bits = {}
    if is_character_level(scorer.dictionary):
        bits = {"bits_per_character": round(-totals["mixture"] / totals["tokens"] / math.log(2), 4)}
    if args.json:
        print(to_json({"total": {**_with_perplexity(totals), **bits}}))
        return 0
    knn = bool(scorer.memories)
    header = ["line", "tokens", "unknown", "log p LM", "ppl LM"]
    header += ["log p kNN-LM", "ppl kNN-LM", "text"] if knn else ["text"]
    cells = [[str(row["line"]), *_cells(row, knn), _shorten(row["text"])] for row in rows]
    print(table(header, [*cells, ["total", *_cells(totals, knn), ""]], left=("text",)))
    if bits:
        print(f"\nbits per character: {bits['bits_per_character']}")
    return 0


def _read_lines(file: str | None) -> Iterable[str]:
    if file is None:
        return sys.stdin
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KnnlmError(f"{file} cannot be read as text ({error}); give a UTF-8 file") from error


def _score_lines(scorer: TextScorer, lines: list[tuple[int, str]], tokenize: Callable[[str], str]) -> list[dict]:
    sequences = [scorer.encode(tokenize(line)) for _, line in lines]
    scored = scorer.score(sequences)
    rows, start = [], 0
    for (number, line), sequence in zip(lines, sequences):
        own = slice(start, start + len(sequence))
        start += len(sequence)
        rows.append(
            {
                "line": number,
                "tokens": len(sequence),
                "unknown": sequence.count(scorer.dictionary.unk()),
                "lm": scored.lm[own].double().sum().item(),
                "mixture": scored.mixture[own].double().sum().item(),
                "text": line,
            }
        )
    return rows


def _with_perplexity(row: dict) -> dict:
    result = {name: row[name] for name in ("line", "tokens", "unknown") if name in row}
    for name in ("lm", "mixture"):
        result[name] = {"log_prob": round(row[name], 4), "perplexity": round(_perplexity(row, name), 4)}
    return result


def _perplexity(row: dict, name: str) -> float:
    return perplexity(row[name] / row["tokens"])


def _cells(row: dict, knn: bool) -> list[str]:
    cells = [str(row["tokens"]), str(row["unknown"])]
    for name in ("lm", "mixture") if knn else ("lm",):
        cells += [f"{row[name]:.2f}", f"{_perplexity(row, name):.2f}"]
    return cells


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"


# --- inspect --------------------------------------------------------------------------------------------------------


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--datastore", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="what to look at")
    source.add_argument("--split", help="look at a split of DATA, from --from on")
    source.add_argument("--serve", action="store_true", help="a live page instead of a file: type, score, continue")
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="first token of the split")
    parser.add_argument("--tokens", type=int, default=500, metavar="M", help="how many (default: %(default)s)")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="of --serve; any other lets the network in")
    parser.add_argument("--port", type=int, default=8765, help="of --serve (default: %(default)s)")


def inspect(args: argparse.Namespace) -> int:
    from ..inspector.collect import Inspector
    from ..inspector.page import build_page

    if args.text is not None and not args.text.strip():
        raise KnnlmError("--text is empty; give at least one word")
    if args.split and (args.start < 0 or args.tokens < 1):
        raise KnnlmError("--from must be 0 or more and --tokens 1 or more")
    scorer = load(args)
    inspector = Inspector.of(scorer)
    if args.serve:
        return _serve(inspector, args)
    if args.split:
        data = inspector.inspect(*_split_tokens(args, scorer))
    else:
        tokenize = tokenizer(args)
        lines = [line for line in args.text.splitlines() if line.strip()]
        data = inspector.inspect([scorer.encode(tokenize(line)) for line in lines])
    write_text(args.output, build_page(data))
    about = data["about"]
    print(f"{args.output}: {len(data['tokens']):,} tokens, perplexity {about['lm']:.2f} LM, {about['mix']:.2f} kNN-LM")
    return 0


def _split_tokens(args: argparse.Namespace, scorer: TextScorer) -> tuple[list[list[int]], int]:
    """Tokens of a split with what comes before them, and how many of them that is."""
    path = Path(args.data) / args.split
    lines = data_utils.load_indexed_dataset(str(path), scorer.dictionary)
    if lines is None:
        raise KnnlmError(f"there is no split {path}; run fairseq-preprocess, or choose another --split")
    total = int(lines.sizes.sum())
    if args.start >= total:
        raise KnnlmError(f"the split has {total:,} tokens, so --from {args.start:,} is behind its end; use less")
    begin = max(0, args.start - (scorer.model.max_positions() or 512) // 2)
    stop = min(args.start + args.tokens, total)
    ends = np.cumsum(lines.sizes)
    first, last = np.searchsorted(ends, [begin, stop - 1], side="right")
    tokens = [token for number in range(first, last + 1) for token in lines[number].tolist()]
    offset = int(ends[first] - lines.sizes[first])
    return [tokens[begin - offset : stop - offset]], args.start - begin


def _serve(inspector: "Inspector", args: argparse.Namespace) -> int:
    from ..inspector.server import LiveInspector, make_server

    server = make_server(LiveInspector(inspector), args.host, args.port)
    server.catch_signals()
    host, port = server.server_address[:2]
    print(f"http://{host}:{port}  (Ctrl-C ends it)", flush=True)
    server.run()
    return 0
