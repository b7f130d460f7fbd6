"""``knnlm prototypes``: what a trained neural editor knows, and what it writes."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KnnlmError
from ..storage import human_bytes, to_json
from .editor_texts import generate, interpolate, load, nearest, reconstruct
from .parsing import CommandParser

if TYPE_CHECKING:
    from ..tasks.editor_loading import LoadedEditor


def add_prototype_commands(parser: CommandParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> CommandParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run, parser=command)
        command.add_argument("--path", required=True, metavar="CHECKPOINT", help="of sparse_editor")
        command.add_argument("--data", required=True, metavar="DATA", help="the binarised sentences")
        command.add_argument("--embeddings", metavar="DIR", help="of knnlm embed (default: as trained)")
        command.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    evaluate = add("evaluate", _evaluate, "perplexity by importance weighting, test time and memory")
    _add_split(evaluate, None)
    evaluate.add_argument("--top", default="20", metavar="M", help="best prototypes, or all (default: %(default)s)")
    evaluate.add_argument("--samples", type=int, default=5, help="edit vectors for each (default: %(default)s)")
    evaluate.add_argument(
        "--rest", type=int, default=10, help="drawn from the other prototypes; 0: they count as nothing (default: 10)"
    )
    evaluate.add_argument(
        "--prune-num", metavar="K[,K...]",
        help="keep the K best prototypes; active: those with 90%% of what sentences gave; all: every one (default)",
    )  # fmt: skip

    writes = add("generate", generate, "sentences from prototypes of the prior and random edits")
    writes.add_argument("--count", type=int, default=10, help="sentences (default: %(default)s)")
    writes.add_argument("--edits", type=int, default=1, help="for each prototype (default: %(default)s)")
    writes.add_argument(
        "--temperature", type=float, default=0.0, help="0: the most probable word (default: %(default)s)"
    )

    between = add("interpolate", interpolate, "sentences between two of a split: one prototype, edits between theirs")
    _add_split(between, None)
    between.add_argument("--first", type=int, required=True, metavar="N", help="number of a sentence, from 1")
    between.add_argument("--last", type=int, required=True, metavar="N", help="number of the other")
    between.add_argument("--steps", type=int, default=5, help="both ends included (default: %(default)s)")

    again = add("reconstruct", reconstruct, "sentences written again from their prototypes and edits")
    _add_split(again, 10)

    active = add("active", _active, "the prototypes that hold the mass, and which words sentences keep of theirs")
    _add_split(active, None)
    active.add_argument("--mass", type=float, default=0.9, help="share of it (default: %(default)s)")
    active.add_argument("--show", type=int, default=10, help="prototypes to print (default: %(default)s)")
    active.add_argument("--tags", metavar="FILE", help="a tagger's file of the split: one tag per word, line by line")


def _add_split(parser: CommandParser, limit: int | None) -> None:
    shown = "all" if limit is None else str(limit)
    parser.add_argument("--split", default="valid", help="(default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=limit, metavar="N", help=f"the first N (default: {shown})")


def _evaluate(args: argparse.Namespace) -> int:
    import torch

    from ..prototypes.estimates import language_model_log_probs, sentence_log_probs
    from ..report.tables import table

    top = _top(args.top)
    if args.samples < 1 or args.rest < 0:
        raise KnnlmError("--samples must be 1 or more, and --rest 0 or more")
    loaded = load(args)
    rows: list[dict[str, Any]] = []
    if loaded.model.prior is None:
        if args.prune_num:
            raise KnnlmError("this model has no prototypes to prune; leave out --prune-num")
        sentences, _ = loaded.split(args.split, args.sentences)
        rows.append({"prototypes": 0, "bytes": 0, **_facts(language_model_log_probs(loaded.model, sentences))})
    else:
        sentences, embeddings = loaded.split(args.split, args.sentences)
        for count in _prune_counts(args.prune_num, loaded):
            kept = loaded.prototypes(count)
            torch.manual_seed(args.seed)
            name = f"scoring with {len(kept):,} prototypes"
            found = sentence_log_probs(loaded.model, kept, sentences, embeddings, top, args.samples, args.rest, name)
            rows.append({"prototypes": len(kept), "bytes": kept.nbytes, **_facts(found)})
    prior = loaded.model.prior
    result = {
        "split": args.split, "sentences": len(sentences), "tokens": int(sentences.lengths.sum()), "top": args.top,
        "samples": args.samples, "rest": args.rest, "active": None if prior is None else prior.active(),
        "rows": rows,
    }  # fmt: skip
    if args.json:
        print(to_json(result))
        return 0
    cells = [
        [
            f"{row['prototypes']:,}", f"{row['perplexity']:.2f}", f"{row['sentences_per_second']:,.1f}",
            f"{row['retrieval_seconds'] * 1e3 / len(sentences):.2f}", human_bytes(row["bytes"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(["prototypes", "perplexity", "sentences/s", "retrieval, ms per sentence", "memory"], cells))
    if result["active"] is not None:
        print(f"\n{result['active']:,} of {len(loaded.prototypes()):,} prototypes hold 90% of what sentences gave them")
    print(f"{len(sentences):,} sentences of {args.split}, {result['tokens']:,} tokens, ends included")
    return 0


def _facts(estimate: Any) -> dict[str, float]:
    names = ("perplexity", "top_perplexity", "sentences_per_second", "seconds", "retrieval_seconds")
    return {"log_prob": float(estimate.log_probs.sum()), **{name: getattr(estimate, name) for name in names}}


def _top(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise KnnlmError(f"--top takes a number of prototypes from 1 on, or all, not '{text}'")
    return int(text)


def _prune_counts(text: str | None, loaded: "LoadedEditor") -> list[int | None]:
    """What --prune-num asks for; None: all of the prototypes."""
    counts: list[int | None] = []
    prior = loaded.model.prior
    for word in (text or "all").split(","):
        if word == "active" and prior is not None:
            counts.append(prior.active())
        elif word == "all":
            counts.append(None)
        elif word.isdigit():
            counts.append(int(word))
            loaded.prototypes(int(word))  # refuse what there is not before anything is scored
        else:
            raise KnnlmError(f"--prune-num takes whole numbers, active or all, separated by commas, not '{word}'")
    return counts


def _active(args: argparse.Namespace) -> int:
    from ..prototypes.kept_words import frequency_classes, kept_words, read_tags, shares_by_class
    from ..report.tables import table

    if not 0 < args.mass <= 1 or args.show < 0:
        raise KnnlmError("--mass must be above 0 and at most 1, and --show 0 or more")
    loaded = load(args)
    kept, prior, dictionary = loaded.prototypes(), loaded.model.prior, loaded.task.dictionary
    sentences, embeddings = loaded.split(args.split, args.sentences)
    if args.tags:
        try:
            lines = Path(args.tags).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KnnlmError(f"{args.tags} cannot be read as text ({error}); give a UTF-8 file") from error
        classes, names = read_tags(lines[: len(sentences)] if args.sentences else lines, sentences, args.tags)
    else:
        by_token, names = frequency_classes(dictionary.nspecial, len(dictionary))
        classes = by_token[sentences.tokens]
    chosen = kept.sentences.rows(nearest(loaded, args.split, embeddings))
    shares = shares_by_class(kept_words(chosen, sentences, dictionary.pad()), classes, sentences.lengths, names)
    best = prior.best(min(args.show, len(kept))).tolist() if prior is not None and args.show else []
    heaviest = [
        {"prototype": number, "mass": float(mass), "text": kept.sentences.text(number, dictionary)}
        for number, mass in zip(best, kept.log_prior[best].exp())
    ]
    count = prior.active(args.mass) if prior is not None else 0
    result = {"active": count, "mass": args.mass, "prototypes": len(kept), "heaviest": heaviest, "kept": shares}
    if args.json:
        print(to_json(result))
        return 0
    print(f"{count:,} of {len(kept):,} prototypes hold {args.mass:.0%} of what sentences gave them\n")
    if heaviest:
        cells = [[f"{row['mass']:.4f}", row["text"]] for row in heaviest]
        print(table(["mass", "prototype"], cells, left=("prototype",)) + "\n")
    cells = [[row["class"], f"{row['words']:,}", f"{row['kept']:.1%}"] for row in shares]
    print(table(["words", "of the sentences", "kept from the prototype"], cells, left=("words",)))
    return 0
