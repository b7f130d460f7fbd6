"""The first lines of a binarised training text, as a corpus of its own with the same valid and dictionary.

    python examples/papers/cut.py DATA OUT --tokens 400000
"""

import argparse
import shutil
from pathlib import Path

from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import make_builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="binarised corpus with train and valid")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--tokens", type=int, required=True, help="take lines until there are so many")
    args = parser.parse_args()
    dictionary = Dictionary.load(str(args.data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(args.data / "train"), dictionary)
    args.out.mkdir(parents=True, exist_ok=True)
    builder = make_builder(str(args.out / "train.bin"), "mmap", vocab_size=len(dictionary))
    taken = tokens = 0
    while taken < len(lines) and tokens < args.tokens:
        builder.add_item(lines[taken])
        tokens, taken = tokens + len(lines[taken]), taken + 1
    for name in ("valid.bin", "valid.idx", "dict.txt"):
        shutil.copyfile(args.data / name, args.out / name)
    builder.finalize(str(args.out / "train.idx"))
    print(f"{tokens:,} tokens in {taken:,} lines")


if __name__ == "__main__":
    main()
