"""Whether binarised data is where it should be, in a sentence instead of a traceback of fairseq."""

from pathlib import Path

from fairseq import utils
from fairseq.data import Dictionary, data_utils

from ..errors import KnnlmError


def check_dictionary_exists(data: str) -> None:
    """Whether the first folder of ``data`` has a dict.txt, of which fairseq would make a traceback if it is missing."""
    path = Path(utils.split_paths(data)[0]) / "dict.txt"
    if not path.is_file():
        what = "has no dict.txt" if path.parent.is_dir() else "is no folder with a dict.txt"
        raise KnnlmError(f"{path.parent} {what}; give the folder that fairseq-preprocess wrote (--destdir)")


def check_split(path: str, dictionary: Dictionary, dataset_impl: str | None, combine: bool = False) -> None:
    """Whether there is a split, and something in it."""
    empty = KnnlmError(f"the split {path} is empty; binarise a text with at least one line")
    binary = Path(f"{path}.bin")
    if binary.exists() and binary.stat().st_size == 0:  # which fairseq cannot map
        raise empty
    lines = data_utils.load_indexed_dataset(path, dictionary, dataset_impl, combine=combine)
    if lines is None:
        raise KnnlmError(f"there is no split {path}; run fairseq-preprocess, or choose another --gen-subset")
    if len(lines) == 0:
        raise empty
