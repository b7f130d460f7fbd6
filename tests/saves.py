"""Saved runs of random similarities."""

from types import SimpleNamespace

import numpy as np
import torch

from fairseq_knnlm.saved_runs.format import MemoryFacts, RunFacts, SaveWriter


def random_save(folder, count=400, k=16, size=24, scale=1.0, split="valid", start=0, seed=0):
    """A save of random similarities in which matching neighbours tend to be nearer; returns what went into it."""
    rng = np.random.default_rng(seed)
    memories = [
        MemoryFacts("knn0", k, 0.25, 1.0, {"keys": "a", "entries": 1000}),
        MemoryFacts("cache", size, 0.1, 0.5, {"boundary": None}),
    ]
    facts = {"split": split, "data_sha256": "d", "checkpoint_sha256": "c", "dictionary_sha256": "e"}
    writer = SaveWriter(folder, RunFacts(facts, start, start + count, 10_000, memories))
    lm = torch.from_numpy(rng.uniform(-8, -1, count).astype(np.float32))
    kept = {}
    for name, width in (("knn0", k), ("cache", size)):
        matches = rng.random((count, width)) < 0.3
        near = -rng.gamma(4.0, 2.0, (count, width)) + 2.0 * matches
        near[rng.random((count, width)) < 0.05] = -np.inf  # absent
        near[3:4] = -np.inf
        if name == "knn0":  # best first, as engines return them
            order = np.argsort(-near, axis=1)
            near, matches = np.take_along_axis(near, order, 1), np.take_along_axis(matches, order, 1)
        matches &= np.isfinite(near)
        near = torch.from_numpy((scale * near).astype(np.float32))
        kept[name] = (near.double().numpy() / scale, matches)
        for rows in torch.arange(count).split(150):
            writer._add_neighbors(name, near[rows], torch.from_numpy(matches)[rows])
    writer.add(lm, torch.zeros(count, dtype=torch.long))
    writer.finish(perplexity=1.0)
    return SimpleNamespace(folder=folder, lm=lm.double().numpy(), **kept)


def brute_force(near, matches, k, sharpness):
    """p of the target with the first k neighbours."""
    near, matches = near[:, :k], matches[:, :k]
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(sharpness * (near - near.max(axis=1, keepdims=True))))
        return np.nan_to_num((weights * matches).sum(axis=1) / weights.sum(axis=1))
