"""Entries of one datastore as queries for another, which may hold the same text."""

import numpy as np

from ..datastore import Datastore

SEQUENCE = 512  # tokens, where the manifest does not say how many the model saw at once


def query_vectors(datastore: Datastore, queries: Datastore, rows: np.ndarray) -> np.ndarray:
    """Keys of one datastore as queries for another: (n,) -> (n, dim of the datastore) float32."""
    vectors = queries.gather_keys(rows).astype(np.float32)
    return vectors if queries.manifest.projection else datastore.codec.project(vectors)


def is_own_text(datastore: Datastore, queries: Datastore) -> bool:
    """Whether both are of the same split, however they were dumped: then a token could find itself."""
    texts = [store.manifest.source.get("data_sha256") for store in (datastore, queries)]
    return queries.fingerprint == datastore.fingerprint or (texts[0] == texts[1] and texts[0] is not None)


def default_window(queries: Datastore) -> int:
    """How near an entry of the same text has to be to be left out: within a sequence, whose context they share."""
    return int(queries.manifest.source.get("tokens_per_sample", SEQUENCE))
