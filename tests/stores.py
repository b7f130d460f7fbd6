"""Small datastores of made-up keys."""

import numpy as np

from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards
from fairseq_knnlm.datastore.key_codec import KeyForm, learn_codec

DIM = 64


def make_store(
    folder, count, key_dtype="float16", seed=0, shard=400, dim=DIM, of_centre=False, weighted=False, text=None, times=1
) -> Datastore:
    """Keys around 40 centres, of which the first ``dim`` principal components are stored; values below 50.

    Args:
        of_centre: whether the value tells the centre, as in a datastore where neighbours are of use
        weighted: whether entries have weights, from 0.05 to 20
        text: seed of another text around the same centres
        times: how often the same count entries come, one text after the other
    """
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(40, DIM))
    rng = rng if text is None else np.random.default_rng(text)
    centre = rng.integers(0, 40, count)
    keys = (centers[centre] + 0.3 * rng.normal(size=(count, DIM))).astype(np.float32)
    values = centre if of_centre else rng.integers(0, 50, count)
    keys, values, count = np.tile(keys, (times, 1)), np.tile(values, times), count * times
    weights = np.exp(rng.uniform(-3, 3, count)) if weighted else None
    rows = [min(shard, count - start) for start in range(0, count, shard)]
    form = KeyForm(DIM, dim, key_dtype)
    manifest = Manifest(
        **form.facts(), entries=count, value_dtype="uint16", key="output", layer=0,
        source={"dictionary_size": 50}, shards=plan_shards(rows), weighted=weighted,
    )  # fmt: skip
    writer = DatastoreWriter(folder, manifest, (lambda: learn_codec(keys, form)) if form.is_compact else None)
    for part in writer.missing_shards():
        output = writer.open_shard(part)
        rows_of_part = slice(part.start, part.stop)
        output.append(keys[rows_of_part], values[rows_of_part], None if weights is None else weights[rows_of_part])
        output.commit()
    writer.finish()
    return Datastore(folder)


def keys_of(store: Datastore) -> np.ndarray:
    """All keys of a datastore, (entries, dim) float32."""
    return np.concatenate(list(store.key_blocks())).astype(np.float32)
