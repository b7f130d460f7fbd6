"""The nearest clusters, plain and in groups."""

import faiss
import pytest
import torch
from stores import keys_of

from fairseq_knnlm.index import build_index, kmeans, open_index


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_clusters_in_groups_are_those_that_faiss_finds(store, metric, monkeypatch):
    monkeypatch.setattr(kmeans, "ROWS", 500)
    index = open_index(store, build_index(store, "IVF64(IVF8,Flat),SQfp16", metric))
    groups = faiss.downcast_index(index.quantizer)
    centres = torch.from_numpy(groups.quantizer.reconstruct_n(0, 8))
    centroids = torch.from_numpy(index.quantizer.reconstruct_n(0, 64))
    keys = torch.from_numpy(keys_of(store))
    grouped = kmeans.GroupedCentroids(centres, centroids, metric)
    for groups.nprobe in (1, 3, 8, 20):
        expected = index.quantizer.assign(keys.numpy(), 1)[:, 0]
        assert (grouped.nearest(keys, groups.nprobe).numpy() == expected).mean() > 0.999  # ties
    empty = kmeans.GroupedCentroids(torch.cat([centres, keys[:200]]), centroids, metric)  # most groups have none
    assert (empty.nearest(keys, 1) >= 0).all()
    everywhere = kmeans.nearest_centroids(keys, centroids, metric)[:, 0]
    assert (grouped.nearest(keys, 8) == everywhere).float().mean() > 0.999
