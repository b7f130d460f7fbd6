"""Writes the demo's text: Python's own documentation, which is on every machine that can run the demo.

    python corpus.py FOLDER      ->  FOLDER/train.txt, valid.txt, test.txt

Two sources: the language reference that ``help("if")`` reads (``pydoc_data.topics``), and the docstrings of the
standard library, taken from its source files without importing them. A topic or a module is one document, a paragraph
one line. About one document in twenty is held out for ``valid`` and another for ``test``, chosen by a hash of its
name, so that every run on one machine gives the same files.
"""

import argparse
import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from sacremoses import MosesTokenizer

# Docstrings of tests speak of tests; the last one is an Easter egg in code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__phello__"}
RULER = re.compile(r"[\W_]+")  # a line with neither letters nor digits: an underlined heading, a box
MAX_TRAIN_TOKENS = 600_000  # keeps the demo to a few minutes, should some later Python document itself at length


def topics() -> Iterator[tuple[str, str]]:
    """The language reference: (name, text) of each topic."""
    from pydoc_data.topics import topics as texts

    for name, text in texts.items():
        yield f"topic {name}", text


def docstrings() -> Iterator[tuple[str, str]]:
    """The standard library: (name, all docstrings) of each module that is written in Python."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        for path in [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]:
            module = path.relative_to(library)
            if path.is_file() and SKIPPED_FOLDERS.isdisjoint(module.parts):
                yield f"module {module.with_suffix('')}", "\n\n".join(module_docstrings(path))


def module_docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in other people's strings
        tree = ast.parse(path.read_bytes())
    yield from nested_docstrings(tree)


def nested_docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        yield from nested_docstrings(child)


def paragraphs(text: str) -> list[str]:
    """One line for each paragraph."""
    lines = ["" if RULER.fullmatch(line) else line.strip() for line in text.splitlines()]
    return [" ".join(block.split()) for block in re.split(r"\n{2,}", "\n".join(lines)) if block.strip()]


def name_hash(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def split_of(name: str) -> str:
    return {0: "test", 1: "valid"}.get(name_hash(name) % 20, "train")


def tokenised_documents() -> dict[str, list[list[str]]]:
    """Documents of each split, as lists of tokenised paragraphs.

    Documents quote each other. A paragraph is kept where it occurs first, and the held-out documents come first: they
    stay whole, and the training text has none of their paragraphs.
    """
    tokenizer = MosesTokenizer("en")
    # A shuffled order mixes topics and modules; a hash of the name is a shuffle that is always the same.
    documents = sorted([*topics(), *docstrings()], key=lambda document: name_hash(document[0]))
    splits: dict[str, list[list[str]]] = {"test": [], "valid": [], "train": []}
    seen: set[str] = set()
    for split, kept in splits.items():
        for name, text in documents:
            if split_of(name) != split:
                continue
            new = [paragraph for paragraph in dict.fromkeys(paragraphs(text)) if paragraph not in seen]
            seen.update(new)
            if new:
                kept.append([" ".join(tokenizer.tokenize(p, aggressive_dash_splits=True, escape=False)) for p in new])
    return splits


def up_to(documents: list[list[str]], max_tokens: int) -> list[list[str]]:
    """The first documents, until they have this many tokens."""
    tokens = 0
    for count, document in enumerate(documents, start=1):
        tokens += sum(len(line.split()) for line in document)
        if tokens >= max_tokens:
            return documents[:count]
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description="write the demo's train.txt, valid.txt and test.txt")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    splits = tokenised_documents()
    splits["train"] = up_to(splits["train"], MAX_TRAIN_TOKENS)
    for split, documents in splits.items():
        lines = [line for document in documents for line in document]
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        tokens = sum(len(line.split()) for line in lines)
        print(f"{split}: {len(documents)} documents, {len(lines):,} paragraphs, {tokens:,} tokens")


if __name__ == "__main__":
    main()
