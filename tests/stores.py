"""Small datastores of made-up keys."""

import numpy as np

from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards

DIM = 64


def make_store(folder, count, key_dtype="float16", seed=0, shard=400) -> Datastore:
    """Keys around 40 centres, values below 50."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(40, DIM))
    keys = (centers[rng.integers(0, 40, count)] + 0.3 * rng.normal(size=(count, DIM))).astype(np.float32)
    values = rng.integers(0, 50, count)
    rows = [min(shard, count - start) for start in range(0, count, shard)]
    manifest = Manifest(
        entries=count, dim=DIM, key_dtype=key_dtype, value_dtype="uint16", key="output", layer=0,
        source={"dictionary_size": 50}, shards=plan_shards(rows),
    )  # fmt: skip
    writer = DatastoreWriter(folder, manifest)
    for part in writer.missing_shards():
        output = writer.open_shard(part)
        output.append(keys[part.start : part.stop], values[part.start : part.stop])
        output.commit()
    writer.finish()
    return Datastore(folder)


def keys_of(store: Datastore) -> np.ndarray:
    """All keys of a datastore, (entries, dim) float32."""
    return np.concatenate(list(store.key_blocks())).astype(np.float32)
