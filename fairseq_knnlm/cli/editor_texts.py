"""Sentences that a trained neural editor writes: new ones, between two, or the same again."""

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KnnlmError
from ..storage import to_json

if TYPE_CHECKING:
    from ..tasks.editor_loading import LoadedEditor


def load(args: argparse.Namespace) -> "LoadedEditor":
    import torch

    from ..tasks.editor_loading import load_editor

    torch.manual_seed(args.seed)
    return load_editor(args.path, args.data, args.embeddings)


def generate(args: argparse.Namespace) -> int:
    import torch

    from ..prototypes.vmf import uniform_on_sphere
    from ..prototypes.writing_sentences import write_sentences

    if args.count < 1 or args.edits < 1 or args.temperature < 0:
        raise KnnlmError("--count and --edits must be 1 or more, and --temperature 0 or more")
    loaded = load(args)
    model, longest = loaded.model, loaded.task.cfg.longest_sentence
    if model.prior is None:
        written = write_sentences(model, None, None, longest, args.temperature or 1.0, args.count)
        return _show(args, [{"sentence": _words(loaded, row)} for row in written])
    kept = loaded.prototypes()
    chosen = torch.multinomial(kept.log_prior.exp(), args.count, replacement=True).repeat_interleave(args.edits)
    edits = uniform_on_sphere(len(chosen), model.edits.dim)
    tokens = _tokens(kept.sentences.rows(chosen.numpy()))
    written = write_sentences(model, tokens, edits, longest, args.temperature)
    return _show(
        args,
        [
            {"prototype": _words(loaded, kept.sentences.tokens[number]), "sentence": _words(loaded, row)}
            for number, row in zip(chosen.tolist(), written)
        ],
    )


def interpolate(args: argparse.Namespace) -> int:
    import torch

    from ..prototypes.estimates import retrieve
    from ..prototypes.vmf import great_circle
    from ..prototypes.writing_sentences import edit_means, write_sentences

    if args.steps < 2:
        raise KnnlmError(f"--steps must be 2 or more, not {args.steps}")
    loaded = load(args)
    kept = loaded.prototypes()
    sentences, embeddings = loaded.split(args.split, args.sentences)
    for name in ("first", "last"):
        if not 1 <= getattr(args, name) <= len(sentences):
            raise KnnlmError(f"--{name} must be 1 to {len(sentences):,}, a sentence of {args.split}")
    numbers = np.array([args.first - 1, args.last - 1])
    # One prototype for both: the one that their retrievals agree on most.
    log_q = retrieve(loaded.model, kept, embeddings[numbers], _own(loaded, args.split, numbers))
    prototype = int(torch.nan_to_num(log_q.sum(dim=0), neginf=-1e9).argmax())
    pair = kept.sentences.rows(np.array([prototype, prototype]))
    ends = edit_means(loaded.model, pair, sentences.rows(numbers))
    edits = great_circle(ends[0], ends[1], args.steps)
    tokens = _tokens(pair)[:1].expand(args.steps, -1)
    written = write_sentences(loaded.model, tokens, edits, loaded.task.cfg.longest_sentence)
    names = ["first", *["between"] * (args.steps - 2), "last"]
    shown = {"prototype": _words(loaded, kept.sentences.tokens[prototype])}
    texts = [sentences.text(int(number), loaded.task.dictionary) for number in numbers]
    rows = [{"place": name, "sentence": _words(loaded, row)} for name, row in zip(names, written)]
    return _show(args, rows, {**shown, "from": texts[0], "to": texts[1]})


def reconstruct(args: argparse.Namespace) -> int:
    from ..prototypes.edit_script import edit_distances
    from ..prototypes.writing_sentences import edit_means, write_sentences

    loaded = load(args)
    sentences, embeddings = loaded.split(args.split, args.sentences)
    kept = loaded.prototypes()
    chosen = nearest(loaded, args.split, embeddings)
    pairs = kept.sentences.rows(chosen)
    edits = edit_means(loaded.model, pairs, sentences)
    written = write_sentences(loaded.model, _tokens(pairs), edits, loaded.task.cfg.longest_sentence)
    rows, mistakes = [], 0
    for number, row in enumerate(written):
        own = sentences.tokens[number, : sentences.lengths[number] - 1]
        wrong = int(edit_distances(np.array([row], np.int32).reshape(1, -1), own[None])[0, -1, -1])
        mistakes += wrong
        rows.append(
            {
                "sentence": sentences.text(number, loaded.task.dictionary),
                "prototype": _words(loaded, pairs.tokens[number]), "written": _words(loaded, row), "mistakes": wrong,
            }
        )  # fmt: skip
    words = int((sentences.lengths - 1).sum())
    return _show(args, rows, {"words": words, "word_error_rate": mistakes / words})


# --- what they share ------------------------------------------------------------------------------------------------


def _own(loaded: "LoadedEditor", split: str, numbers: np.ndarray) -> np.ndarray | None:
    """The prototypes that are the sentences themselves, which they must not retrieve."""
    return numbers if split == loaded.task.cfg.prototype_split else None


def nearest(loaded: "LoadedEditor", split: str, embeddings: np.ndarray) -> np.ndarray:
    """The best prototype of each sentence by q(t|x), (n,)."""
    from ..prototypes.estimates import retrieve

    kept, found = loaded.prototypes(), []
    for start in range(0, len(embeddings), 256):
        numbers = np.arange(start, min(start + 256, len(embeddings)))
        log_q = retrieve(loaded.model, kept, embeddings[numbers], _own(loaded, split, numbers))
        found.append(log_q.argmax(dim=1).cpu().numpy())
    return np.concatenate(found)


def _tokens(rows: Any) -> Any:
    import torch

    return torch.from_numpy(rows.tokens.astype(np.int64))


def _words(loaded: "LoadedEditor", tokens: Any) -> str:
    from ..data.sentences import words_of

    return words_of(tokens, loaded.task.dictionary)


def _show(args: argparse.Namespace, rows: list[dict[str, Any]], about: dict[str, Any] | None = None) -> int:
    """Rows as JSON or as text; with what holds for all of them."""
    if args.json:
        print(to_json({**(about or {}), "rows": rows}))
        return 0
    for row in rows:
        print("\n".join(f"{name}: {value}" for name, value in row.items()) + ("\n" if len(row) > 1 else ""))
    for name, value in (about or {}).items():
        print(f"{name.replace('_', ' ')}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    return 0
