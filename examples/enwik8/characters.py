"""A text as tokens of one byte each, for character-level language models.

    python examples/enwik8/characters.py FILE OUT --valid 5000000 --test 5000000

Writes OUT/train.txt, OUT/valid.txt and OUT/test.txt: the last --test bytes are test, those before them valid, as is
usual for enwik8 (90, 5 and 5 million). Visible ASCII stands for itself, a blank is "_" (an underscore is <0x5F>), every
other byte is <0xNN>. A line of the file is a line, whose end fairseq counts as one token: there are as many tokens as
bytes (and one more where a part does not end with a line).
"""

import argparse
import sys
from pathlib import Path

TOKENS = [chr(byte) if 33 <= byte < 127 and chr(byte) != "_" else f"<0x{byte:02X}>" for byte in range(256)]
TOKENS[ord(" ")] = "_"


def write(path: Path, text: bytes) -> None:
    temporary = path.with_suffix(".part")
    with open(temporary, "w", encoding="ascii") as file:
        for line in text.removesuffix(b"\n").split(b"\n"):
            file.write(" ".join(TOKENS[byte] for byte in line) + "\n")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--valid", type=int, required=True, help="bytes")
    parser.add_argument("--test", type=int, required=True, help="bytes")
    args = parser.parse_args()
    text = args.file.read_bytes()
    rest = len(text) - args.valid - args.test
    if min(args.valid, args.test, rest) < 1:
        sys.exit(f"error: {args.file} has {len(text):,} bytes, too few for valid, test and train; give smaller parts")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"train": text[:rest], "valid": text[rest : rest + args.valid], "test": text[rest + args.valid :]}
    for split, part in parts.items():
        write(args.out / f"{split}.txt", part)
        print(f"{split}: {len(part):,} bytes")


if __name__ == "__main__":
    main()
