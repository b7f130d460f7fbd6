"""A folder of plain-text books -> train.txt, valid.txt and test.txt, one paragraph a line, whole books held out.

    python examples/books/tokenise.py BOOKS OUTPUT --held-out 2

Which books are held out depends on their file names alone, so adding a book moves no other one between splits unless
it takes a place itself.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sacremoses import MosesPunctNormalizer, MosesTokenizer
from tqdm import tqdm


def paragraphs(text: str) -> Iterator[str]:
    """Text between blank lines, each as one line."""
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        line = " ".join(block.split())
        if line:
            yield line


def split_books(books: list[Path], held_out: int) -> dict[str, list[Path]]:
    """valid and test get ``held_out`` books each, by the hash of their names."""
    order = sorted(books, key=lambda book: hashlib.sha256(book.name.encode()).digest())
    return {"valid": order[:held_out], "test": order[held_out : 2 * held_out], "train": sorted(order[2 * held_out :])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--held-out", type=int, default=2, help="books for valid, and as many for test")
    parser.add_argument("--lang", default="en")
    args = parser.parse_args()
    books = sorted(args.books.glob("*.txt"))
    if len(books) <= 2 * args.held_out:
        sys.exit(
            f"error: {args.books} has {len(books)} *.txt files; give at least {2 * args.held_out + 1}, so that "
            f"{args.held_out} can be held out for valid, {args.held_out} for test, and one is left to train on"
        )
    tokenizer, normalizer = MosesTokenizer(lang=args.lang), MosesPunctNormalizer(lang=args.lang)
    args.output.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(books), unit="book") as bar:
        for split, members in split_books(books, args.held_out).items():
            lines = tokens = 0
            with open(args.output / f"{split}.txt", "w", encoding="utf-8") as output:
                for book in members:
                    for paragraph in paragraphs(book.read_text(encoding="utf-8", errors="replace")):
                        words = tokenizer.tokenize(
                            normalizer.normalize(paragraph), aggressive_dash_splits=True, escape=False
                        )
                        output.write(" ".join(words) + "\n")
                        lines, tokens = lines + 1, tokens + len(words) + 1
                    bar.update()
            tqdm.write(f"{split}: {len(members)} books, {lines:,} paragraphs, {tokens:,} tokens with the ends of lines")


if __name__ == "__main__":
    main()
