"""The published method (Khandelwal et al. 2020), plainly, as something to measure against.

    python -m benchmarks.original RAW-DIR LAMBDA TEMPERATURE DATA-BIN --path CHECKPOINT [flags of fairseq-eval-lm]

A 64-byte product quantiser over 4,096 clusters finds 1024 neighbours, their keys are gathered from a memory map, and
squared L2 distances in full precision become p_kNN. The LM's own probability is stock fairseq's: normalised over the
whole vocabulary for every token. RAW-DIR is what ``write_raw`` makes of a datastore. The index is our
preset ``paper``, whose clusters torch finds several times as fast as FAISS would.
"""

import json
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import torch
from fairseq.sequence_scorer import SequenceScorer
from fairseq_cli import eval_lm

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.keys.extractor import KeyExtractor

K = 1024
NPROBE = 32
ROWS_AT_ONCE = 64  # whose neighbours' keys are in memory at once; it gets no faster with more


def build_from(trained: Path, store: Datastore, path: Path) -> None:
    """An index with the clusters and codes of another one, for growth: training takes most of the time."""
    index = faiss.read_index(str(trained))
    index.reset()
    for block in store.key_blocks():
        index.add(np.asarray(block, np.float32))
    faiss.write_index(index, str(path))


def write_raw(store: Datastore, folder: Path, index: Path) -> None:
    """A datastore's keys and values in one file each, as the original implementation has them, and its index."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "facts.json"
    if done.exists():
        return
    keys = np.memmap(folder / "keys", np.float16, "w+", shape=(len(store), store.dim))
    start = 0
    for block in store.key_blocks():
        keys[start : start + len(block)] = block
        start += len(block)
    keys.flush()
    np.asarray(store.values[:], np.int32).tofile(folder / "values")
    facts = {"entries": len(store), "dim": store.dim, "index": str(index.resolve()), "layer": store.manifest.layer}
    done.write_text(json.dumps(facts))


class PlainKNN:
    """Neighbours from the index, distances from the keys, one batch of queries at a time."""

    def __init__(self, folder: Path):
        facts = json.loads((folder / "facts.json").read_text())
        self.layer = facts["layer"]
        self.index = faiss.read_index(facts["index"])
        self.index.nprobe = NPROBE
        self.keys = np.memmap(folder / "keys", np.float16, "r", shape=(facts["entries"], facts["dim"]))
        self.values = np.fromfile(folder / "values", np.int32)
        self.seconds = {"search": 0.0, "rescoring": 0.0}

    def target_log_probs(self, queries: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        """queries (n, dim), targets (n,) -> log p_kNN (n,)."""
        started = time.perf_counter()
        _, ids = self.index.search(queries.numpy(), K)
        self.seconds["search"] += time.perf_counter() - started
        started = time.perf_counter()
        parts = []
        for rows in torch.arange(len(queries)).split(ROWS_AT_ONCE):
            found = ids[rows.numpy()]
            keys = torch.from_numpy(self.keys[found]).float()  # (rows, K, dim)
            distances = (queries[rows, None] - keys).square().sum(dim=2)
            shares = (-distances / temperature).log_softmax(dim=1)
            hits = torch.from_numpy(self.values[found]) == targets[rows, None]
            parts.append(shares.masked_fill(~hits, -torch.inf).logsumexp(dim=1))
        self.seconds["rescoring"] += time.perf_counter() - started
        return torch.cat(parts)


class OriginalScorer(SequenceScorer):
    """fairseq's scorer, whose scores are mixed with p_kNN afterwards."""

    knn: PlainKNN
    weight: float
    temperature: float
    extractor: KeyExtractor | None = None
    model_seconds = 0.0

    @torch.no_grad()
    def generate(self, models, sample, **kwargs):
        if self.extractor is None:
            self.extractor = KeyExtractor(models[0], "ffn_input_ln", self.knn.layer)
        started = time.perf_counter()
        hypotheses = super().generate(models, sample, **kwargs)
        type(self).model_seconds += time.perf_counter() - started
        keys = self.extractor.pop()
        rows, queries = [hypothesis for hypothesis, *_ in hypotheses], []
        for number, row in enumerate(rows):
            start = sample["start_indices"][number] if "start_indices" in sample else 0
            queries.append(keys[number, start : start + len(row["tokens"])])
        tokens = torch.cat([row["tokens"] for row in rows])
        knn = self.knn.target_log_probs(torch.cat(queries), tokens, self.temperature)
        for row, own in zip(rows, knn.split([len(row["tokens"]) for row in rows])):
            scores = row["positional_scores"]
            row["positional_scores"] = torch.logaddexp(scores + np.log(1 - self.weight), own + np.log(self.weight))
        return hypotheses


def main() -> None:
    folder, weight, temperature = sys.argv[1:4]
    del sys.argv[1:4]
    OriginalScorer.knn = knn = PlainKNN(Path(folder))
    OriginalScorer.weight, OriginalScorer.temperature = float(weight), float(temperature)
    eval_lm.SequenceScorer = OriginalScorer
    eval_lm.cli_main()
    seconds = {"model": OriginalScorer.model_seconds, **knn.seconds}
    print("original: " + ", ".join(f"{name} {time:.1f}s" for name, time in seconds.items()))


if __name__ == "__main__":
    main()
