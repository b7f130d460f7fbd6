"""What the rows of an output embedding are before training."""

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..index.kmeans import kmeans
from ..progress import progress
from .rows import RowLayout

STARTS = ("lm", "random", "centres")
NOISE = 0.1  # of the rows' own spread: rows of one word that are alike would stay alike
KEYS_PER_ROW = 16  # that k-means sees
SAMPLE = 1 << 14
FEW_KEYS = 20  # that are added to those of each word, all at the mean


def rows_from_words(words: Tensor, layout: RowLayout, seed: int) -> Tensor:
    """The rows of each word near one vector: (V, dim) -> (rows, dim)."""
    rows = words[layout.words].clone()
    if not layout.is_single:
        generator = torch.Generator().manual_seed(seed)
        several = (layout.counts > 1)[layout.words]
        noise = torch.randn(rows.shape, generator=generator) * (NOISE * float(words.std()))
        rows += noise * several[:, None]
    return rows


def random_rows(layout: RowLayout, datastore: Datastore, metric: str, seed: int) -> Tensor:
    """Small random rows; for distances, around the mean of the keys."""
    generator = torch.Generator().manual_seed(seed)
    sample = key_sample(datastore)
    spread = float(sample.std())
    rows = torch.randn(layout.total, datastore.dim, generator=generator)
    if metric == "l2":
        return sample.mean(dim=0) + rows * (NOISE * spread)
    return rows * (NOISE / (spread * datastore.dim**0.5))  # scores of about a tenth


def away_by_frequency(frequencies: np.ndarray, layout: RowLayout, datastore: Datastore, temperature: float) -> Tensor:
    """What to add to rows near the mean of the keys, so that distances know how frequent words are: (rows, dim).

    An inner product learns that in a few steps, because keys have a mean; a distance from it says nothing of it. So a
    row moves away from the keys by sqrt(T log(f of the most frequent word / f)), in the direction in which they vary
    least, which is the same for all of them.
    """
    keys = key_sample(datastore).double()
    _, directions = torch.linalg.eigh(torch.cov(keys.T))  # ascending variances
    shares = torch.from_numpy((frequencies + 1.0) / (frequencies + 1.0).max())
    length = (-temperature * (shares / layout.counts).log()).clamp(min=0).sqrt()
    return (length[layout.words][:, None] * directions[:, 0]).float()


def centre_rows(layout: RowLayout, datastore: Datastore, metric: str, seed: int, temperature: float = 1.0) -> Tensor:
    """Towards the centres of each word's keys: their mean, drawn to that of all keys where they are few; or k-means.

    The centres as they are would predict far too sharply, because the dimensions of keys depend on each other. So rows
    lie on the way from the mean of all keys (with inner products, from nothing) to the centre, as far as makes logits
    that differ by about 1.
    """
    sums, counts = torch.zeros(len(layout), datastore.dim), torch.zeros(len(layout))
    start = 0
    with progress("averaging", len(datastore), " keys") as bar:
        for block in datastore.key_blocks():
            keys = torch.from_numpy(np.ascontiguousarray(block, np.float32))
            values = torch.from_numpy(datastore.values[start : start + len(keys)].astype(np.int64))
            sums.index_add_(0, values, keys)
            counts.index_add_(0, values, torch.ones(len(values)))
            start += len(keys)
            bar.update(len(keys))
    mean = sums.sum(dim=0) / counts.sum()
    rows = rows_from_words((sums + FEW_KEYS * mean) / (counts + FEW_KEYS)[:, None], layout, seed)
    if not layout.is_single:
        _several_centres(rows, layout, datastore, seed)
    rows -= mean
    some = rows[:: max(1, len(rows) // 1024)]
    scores = (key_sample(datastore, 1024) - mean) @ some.T * ((1.0 if metric == "ip" else 2.0) / temperature)
    rows /= scores.std().clamp(min=1e-12)
    return rows if metric == "ip" else mean + rows


def _several_centres(rows: Tensor, layout: RowLayout, datastore: Datastore, seed: int) -> None:
    """Set the rows of each word that has several, and at least as many keys, by k-means of some of its keys."""
    order = np.argsort(datastore.values, kind="stable")
    starts = np.searchsorted(datastore.values[order], np.arange(len(layout) + 1))
    rng = np.random.default_rng(seed)
    words = [w for w in (layout.counts > 1).nonzero()[:, 0].tolist() if starts[w + 1] - starts[w] >= layout.counts[w]]
    with progress("clustering", len(words), " words") as bar:
        for first in range(0, len(words), 256):
            some = words[first : first + 256]
            entries = []
            for word in some:
                own, most = order[starts[word] : starts[word + 1]], KEYS_PER_ROW * int(layout.counts[word])
                entries.append(own if len(own) <= most else np.sort(rng.choice(own, most, replace=False)))
            keys = torch.from_numpy(datastore.gather_keys(np.concatenate(entries)).astype(np.float32))
            for word, own_keys in zip(some, keys.split([len(own) for own in entries])):
                begin = int(layout.starts[word])
                count = int(layout.counts[word])
                rows[begin : begin + count] = kmeans(own_keys, count, "l2", seed)
            bar.update(len(some))


def key_sample(datastore: Datastore, count: int = SAMPLE) -> Tensor:
    """Keys spread evenly over a datastore, (n, dim) float32."""
    entries = np.linspace(0, len(datastore) - 1, min(count, len(datastore))).astype(np.int64)
    return torch.from_numpy(datastore.gather_keys(entries).astype(np.float32))
