"""Some text of a file, from all over it, as raw text.

    python examples/hugging_face/text.py IN OUT --words 100000 [--pieces 20] [--detokenise]

takes so many words in so many stretches of whole lines, evenly spread. ``--detokenise`` undoes Moses tokenisation
(sacremoses), because a model that was trained on raw text has hardly seen "it 's" or "( that is )".
"""

import argparse
import sys
from pathlib import Path

from sacremoses import MosesDetokenizer

from fairseq_knnlm.storage import make_folder, write_text


def stretches(lines: list[str], words: int, pieces: int) -> list[str]:
    """Lines of about so many words: ``pieces`` stretches that begin at equal distances."""
    taken: dict[int, None] = {}
    for piece in range(pieces):
        count = 0
        for number in range(piece * len(lines) // pieces, (piece + 1) * len(lines) // pieces):
            if count >= words / pieces:
                break
            taken[number] = None
            count += len(lines[number].split())
    return [lines[number] for number in taken]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--words", type=int, required=True)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--detokenise", action="store_true", help="the text is tokenised by Moses rules: undo that")
    args = parser.parse_args()
    lines = Path(args.source).read_text(encoding="utf-8").split("\n")
    some = stretches([line for line in lines if line.strip()], args.words, args.pieces)
    if not some:
        print(f"error: {args.source} has no text; give another file", file=sys.stderr)
        return 1
    if args.detokenise:
        raw = MosesDetokenizer(lang="en")
        some = [raw.detokenize(line.split()) for line in some]
    make_folder(Path(args.target).parent)
    write_text(args.target, "\n".join(some) + "\n")
    print(f"{args.target}: {sum(len(line.split()) for line in some):,} words in {len(some):,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
