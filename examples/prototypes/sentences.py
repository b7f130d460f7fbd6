"""Short sentences for the neural editor, from tokenised text: plain or gzipped, one paragraph to a line.

    python examples/prototypes/sentences.py OUT --train FILE[,FILE...] --valid FILE[,FILE...] [--count 20000]

Writes OUT/train.txt, OUT/valid.txt and OUT/test.txt. The documents of --valid are no documents of --train; valid is
made from their first half, test from the second. A sentence ends with a full stop, a question or an exclamation mark,
has --shortest to --longest tokens, mostly words, and is there once. The choice depends on --seed alone.
"""

import argparse
import gzip
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ENDS = {".", "!", "?"}


def read(path: str) -> list[str]:
    content = Path(path).read_bytes()
    return (gzip.decompress(content) if path.endswith(".gz") else content).decode().splitlines()


def sentences_of(line: str, shortest: int, longest: int, lower: bool) -> Iterator[str]:
    """The sentences of a paragraph; a mark ends one if a capital or nothing follows."""
    words, begin = line.split(), 0
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else "A"
        if word in ENDS and following[:1].isupper():
            sentence, begin = words[begin : place + 1], place + 1
            alphabetic = sum(word.isalpha() for word in sentence)
            if shortest <= len(sentence) <= longest and alphabetic >= 0.7 * len(sentence):
                text = " ".join(sentence)
                yield text.lower() if lower else text


def choose(lines: list[str], count: int, args: argparse.Namespace, seen: set[str], seed: int) -> list[str]:
    """So many different sentences, in random order."""
    found = []
    for line in lines:
        for sentence in sentences_of(line, args.shortest, args.longest, not args.keep_case):
            if sentence not in seen:
                seen.add(sentence)
                found.append(sentence)
    if len(found) < count:
        print(f"warning: there are {len(found):,} such sentences, not {count:,}", file=sys.stderr)
    random.Random(seed).shuffle(found)
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True, help="files, separated by commas")
    parser.add_argument("--valid", required=True, help="files of other documents")
    parser.add_argument("--count", type=int, default=20000, help="sentences of train (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=1000, help="of valid and of test (default: %(default)s)")
    parser.add_argument("--shortest", type=int, default=5)
    parser.add_argument("--longest", type=int, default=20)
    parser.add_argument("--keep-case", action="store_true", help="do not write everything in small letters")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    held_out = [line for path in args.valid.split(",") for line in read(path)]
    half, seen = len(held_out) // 2, set()
    texts = {"valid": held_out[:half], "test": held_out[half:]}
    texts["train"] = [line for path in args.train.split(",") for line in read(path)]  # without those held out
    for number, (split, lines) in enumerate(texts.items()):
        count = args.count if split == "train" else args.held_out
        chosen = choose(lines, count, args, seen, args.seed + number)
        if not chosen:
            sys.exit(f"error: there are no sentences for {split}; give more text, tokenised, with full stops")
        (args.out / f"{split}.txt").write_text("".join(f"{sentence}\n" for sentence in chosen), encoding="utf-8")
        print(f"{args.out / split}.txt: {len(chosen):,} sentences, {sum(len(s.split()) for s in chosen):,} tokens")


if __name__ == "__main__":
    main()
