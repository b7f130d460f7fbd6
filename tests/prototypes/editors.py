"""A tiny editor on tiny data: binarised sentences, embeddings, and how to train on them."""

from pathlib import Path

import numpy as np
from commands import REPO
from fairseq.data import Dictionary
from tiny import make_data, make_lines

from fairseq_knnlm.data.dictionaries import dictionary_facts
from fairseq_knnlm.data.sentences import load_sentences
from fairseq_knnlm.prototypes.embeddings import write_embeddings

EDITOR = [
    "--user-dir", REPO / "fairseq_knnlm", "--task", "sparse_prototypes", "--criterion", "prototype_elbo", "--cpu",
    "--optimizer", "adam", "--lr", "0.003", "--batch-size", "16", "--no-progress-bar", "--num-workers", "0",
    "--embed-dim", "16", "--hidden-dim", "24", "--edit-dim", "4", "--edit-kappa", "5", "--edit-hidden-dim", "8",
    "--prototype-warmup", "4", "--no-epoch-checkpoints", "--retriever-spread", "4",
    "--required-batch-size-multiple", "1",
]  # fmt: skip
LSTM = ["--arch", "sparse_editor"]


def word_embeddings(data: Path, folder: Path, *splits: str) -> Path:
    """A sentence is the mean of random vectors of its words."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    table = np.random.default_rng(5).normal(size=(len(dictionary), 12))
    for split in splits:
        sentences = load_sentences(str(data), split, dictionary)
        rows = [table[row[: length - 1]].mean(axis=0) for row, length in zip(sentences.tokens, sentences.lengths)]
        digest = dictionary_facts(dictionary)["dictionary_sha256"]
        write_embeddings(folder / split, np.stack(rows), sentences, digest, {"array": "made up"})
    return folder


def make_editor_data(folder: Path, train: int = 60, valid: int = 12) -> tuple[Path, Path]:
    data = make_data(folder / "bin", train=make_lines(train, 0), valid=make_lines(valid, 1))
    return data, word_embeddings(data, folder / "embeddings", "train", "valid")
