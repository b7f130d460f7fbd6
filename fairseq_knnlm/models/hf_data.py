"""``knnlm hf prepare``: a data folder for a model of Hugging Face, complete with the checkpoint that points to it."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..data.dictionaries import dictionary_facts
from ..data.hf_prepare import binarise
from ..errors import KnnlmError, resumable
from ..storage import Lock, make_folder, publish_folder, write_record, write_text
from ..storage.folders import clear_work_folder
from .hf_loading import POINTER, HFFolder, write_pointer

FORMAT = "fairseq-knnlm hugging-face-data"
VERSION = 1
RECORD = "hugging_face.json"
ENDINGS = (".bin", ".idx", ".counts.npy")


def is_data_file(name: str) -> bool:
    """Whether a file of this name was written here."""
    return name in ("dict.txt", RECORD, POINTER) or name.endswith(ENDINGS)


def prepare(place: HFFolder, texts: dict[str, str], folder: str | Path, dtype: str) -> dict[str, dict[str, int]]:
    """Write a data folder, which appears when it is whole; the size of each split.

    Args:
        texts: the path of the raw text of each split
        dtype: what the weights are to be loaded as
    """
    if not texts:
        raise KnnlmError("there is no text to prepare; give --trainpref, --validpref or --testpref")
    if missing := [text for text in texts.values() if not Path(text).is_file()]:
        raise KnnlmError(f"there is no text {missing[0]}; give a file")
    folder = Path(folder)
    config = place.config()
    tokenizer = place.tokenizer(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise KnnlmError(f"{folder} exists already; choose another --destdir or delete this one")
    work = folder.with_name(folder.name + ".partial")
    make_folder(folder.parent)
    with Lock(
        folder.with_name(folder.name + ".lock"), f"preparing {folder}", wait=False, instead="choose another --destdir"
    ), resumable("nothing is lost but this run; start it again"):  # fmt: skip
        make_folder(work)
        clear_work_folder(work, is_data_file)  # of what a killed run left
        dictionary = tokenizer.dictionary()
        content = io.StringIO()
        dictionary.save(content)
        write_text(work / "dict.txt", content.getvalue())
        sizes = {}
        for split, text in texts.items():
            sizes[split] = asdict(binarise(tokenizer, len(dictionary), text, work, split))
        write_pointer(work / POINTER, place, dtype)
        facts: dict[str, Any] = {
            "format": FORMAT, "version": VERSION, "model": str(place.folder.resolve()), "gguf": place.gguf,
            "fingerprint": place.fingerprint(), "dtype": dtype, **dictionary_facts(dictionary), "splits": sizes,
        }  # fmt: skip
        write_record(work / RECORD, facts)
        publish_folder(work, folder, is_data_file)
    return sizes
