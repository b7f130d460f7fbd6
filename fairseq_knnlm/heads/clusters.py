"""A datastore as clusters of its keys, each with a distribution of words (Xu et al. 2023, appendix C.3).

P(y|h) = sum over the clusters c of softmax_c(score(h, centroid of c) / T) p(y|c), where p(y|c) is the share of y among
the values of the entries whose key is in c.
"""

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.kmeans import GroupedCentroids, train_centroids, train_two_level_centroids
from ..progress import progress

SAMPLE_PER_CLUSTER = 40  # keys that k-means sees
FEW = 512  # clusters that are found in one level
PROBE = 8  # groups in which the nearest centroid is looked for
ROWS_AT_ONCE = 1 << 16


class ClusterWords:
    """The words of each cluster and their counts, as sparse rows."""

    def __init__(self, starts: Tensor, words: Tensor, counts: Tensor, vocabulary: int):
        """
        Args:
            starts: (clusters + 1,) where the words of each cluster begin
            words: (pairs,) ascending in each cluster
            counts: (pairs,)
        """
        self.starts, self.words, self.counts, self.vocabulary = starts.long(), words.long(), counts, vocabulary
        self.cluster = torch.repeat_interleave(self.starts.diff())  # (pairs,)
        totals = torch.zeros(len(self), dtype=torch.double, device=counts.device)
        totals.index_add_(0, self.cluster, counts.double())
        self.shares = (counts.double() / totals[self.cluster]).float()  # (pairs,) p(word|cluster)
        self._by_word: tuple[Tensor, Tensor, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def to(self, device: torch.device | str) -> "ClusterWords":
        return ClusterWords(
            self.starts.to(device), self.words.to(device), self.counts.to(device), self.vocabulary
        )

    def target_probabilities(self, shares: Tensor, targets: Tensor) -> Tensor:
        """p of the targets: shares of the clusters (n, clusters), targets (n,) -> (n,)."""
        if self._by_word is None:
            order = self.words.argsort(stable=True)
            sizes = torch.bincount(self.words, minlength=self.vocabulary)
            starts = [0, *sizes.cumsum(0).tolist()]
            self._by_word = self.cluster[order], self.shares[order], starts
        clusters, of_word, starts = self._by_word
        found = shares.new_zeros(len(targets))
        for word in targets.unique().tolist():
            own = (targets == word).nonzero()[:, 0]
            pairs = slice(starts[word], starts[word + 1])
            if pairs.start < pairs.stop:
                found[own] = shares[own].index_select(1, clusters[pairs]) @ of_word[pairs]
        return found

    def vocabulary_probabilities(self, shares: Tensor) -> Tensor:
        """p of every word: shares (n, clusters) -> (n, vocabulary)."""
        found = shares.new_zeros(len(shares), self.vocabulary)
        for row, own in zip(found, shares):
            row.index_add_(0, self.words, own[self.cluster] * self.shares)
        return found

    def table(self, clusters: Tensor, targets: Tensor) -> Tensor:
        """p(target|cluster) for some clusters, ascending, and targets: (c,), (n,) -> (n, c)."""
        unique, place = targets.unique(return_inverse=True)
        column = torch.full((self.vocabulary,), -1)
        column[unique] = torch.arange(len(unique))
        sizes = self.starts[clusters + 1] - self.starts[clusters]
        number = torch.repeat_interleave(sizes)  # of the cluster, for each of its pairs
        pairs = torch.arange(len(number)) - (sizes.cumsum(0) - sizes)[number] + self.starts[clusters][number]
        columns = column[self.words[pairs]]
        wanted = columns >= 0
        result = torch.zeros(len(unique), len(clusters))
        result[columns[wanted], number[wanted]] = self.shares[pairs[wanted]]
        return result[place]


class _KeySample:
    """Every so many-th key of a datastore, as the k-means of the index takes them."""

    def __init__(self, datastore: Datastore, count: int):
        self._datastore, self._every = datastore, max(1, len(datastore) // count)

    def __len__(self) -> int:
        return -(-len(self._datastore) // self._every)

    def blocks(self):  # type: ignore[no-untyped-def]
        start = 0
        for block in self._datastore.key_blocks(ROWS_AT_ONCE):
            first = -start % self._every
            yield torch.from_numpy(np.ascontiguousarray(block[first :: self._every], np.float32))
            start += len(block)


def cluster_keys(datastore: Datastore, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """k-means of the keys: centroids (count, dim), and the cluster of each entry (entries,).

    By squared distances, whatever the metric of the head: a cluster is a place, and its centroid the mean of its keys.
    """
    if count > len(datastore):
        raise KnnlmError(f"{count:,} clusters need as many entries, but {datastore.folder} has {len(datastore):,}")
    sample = _KeySample(datastore, max(count, min(len(datastore), SAMPLE_PER_CLUSTER * count)))
    groups = max(1, round(count**0.5))
    if count <= FEW:
        found = train_centroids(torch.cat(list(sample.blocks())).numpy(), count, "l2", seed)
        centres = torch.from_numpy(found[:1])
    else:
        found = train_two_level_centroids(sample, groups, count, "l2", seed)
        centres = torch.from_numpy(train_centroids(found[:: max(1, len(found) // (64 * groups))], groups, "l2", seed))
    centroids = torch.from_numpy(found)
    grouped = GroupedCentroids(centres, centroids, "l2")
    cluster = []
    with progress("assigning", len(datastore), " keys") as bar:
        for block in datastore.key_blocks(ROWS_AT_ONCE):
            cluster.append(grouped.nearest(torch.from_numpy(np.ascontiguousarray(block, np.float32)), PROBE))
            bar.update(len(block))
    return centroids, torch.cat(cluster)


def count_words(cluster: Tensor, values: np.ndarray, clusters: int, vocabulary: int) -> ClusterWords:
    """The words of each cluster: cluster (entries,), values (entries,)."""
    pairs = cluster.numpy().astype(np.int64) * vocabulary + values
    unique, counts = np.unique(pairs, return_counts=True)
    starts = np.searchsorted(unique, np.arange(clusters + 1) * vocabulary)
    words = torch.from_numpy(unique % vocabulary)
    return ClusterWords(torch.from_numpy(starts), words, torch.from_numpy(counts.astype(np.int32)), vocabulary)


def drop_empty(centroids: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor]:
    """Without clusters that no key is nearest to: they have no words, and would take mass to nowhere."""
    used, cluster = cluster.unique(return_inverse=True)
    return centroids[used], cluster
