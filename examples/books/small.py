"""Books to try the recipe out on, and text of another domain, from Python's own documentation.

    python examples/books/small.py FOLDER   ->  FOLDER/books/*.txt, FOLDER/other/train.txt, FOLDER/other/valid.txt

The books are the language reference (``help("if")`` reads it), its topics dealt out to eight books; the other domain is
the docstrings of the standard library, tokenised.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from sacremoses import MosesTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
from corpus import docstrings, name_hash, paragraphs, topics  # the demo's sources

BOOKS = 8
MAX_PARAGRAPHS = 6_000  # of the other domain; enough for a toy LM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in ("books", "other"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    books: dict[int, list[str]] = {number: [] for number in range(BOOKS)}
    seen: set[str] = set()  # topics quote each other; a paragraph stays in one book
    for name, text in topics():
        new = [paragraph for paragraph in dict.fromkeys(paragraphs(text)) if paragraph not in seen]
        seen.update(new)
        books[name_hash(name) % BOOKS] += new
    for number, lines in books.items():
        (folder / f"books/book{number}.txt").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = MosesTokenizer("en")
    prose = chain.from_iterable(paragraphs(text) for _, text in docstrings())
    lines = [line for line, _ in zip(dict.fromkeys(prose), range(MAX_PARAGRAPHS))]
    lines = [" ".join(tokenizer.tokenize(line, aggressive_dash_splits=True, escape=False)) for line in lines]
    held_out = len(lines) // 20
    for split, part in (("valid", lines[:held_out]), ("train", lines[held_out:])):
        (folder / f"other/{split}.txt").write_text("".join(f"{line}\n" for line in part), encoding="utf-8")


if __name__ == "__main__":
    main()
