"""What a save says of the entries of a datastore of the same text."""

from pathlib import Path

import numpy as np

from ..datastore import Datastore
from ..errors import KnnlmError
from .scores import SavedScores


def lm_log_probs(datastore: Datastore, folders: list[str] | list[Path]) -> np.ndarray:
    """log p_LM of each entry's value, (entries,) float32, from a save of the split that the datastore is of."""
    saved = SavedScores.open(folders)
    remedy = f"score the split of {datastore.folder} with --knn-save, and the same model and context"
    for fact in ("checkpoint_sha256", "dictionary_sha256", "data_sha256"):
        if saved.run.source.get(fact) != datastore.manifest.source.get(fact):
            raise KnnlmError(f"{folders[0]} is of another {fact.split('_')[0]} than {datastore.folder}; {remedy}")
    places = np.arange(len(datastore)) if datastore.positions is None else np.asarray(datastore.positions)
    known = np.concatenate([np.arange(part.run.start, part.run.stop) for part in saved.parts])
    found = np.searchsorted(known, places)
    if len(known) == 0 or found.max(initial=0) >= len(known) or (known[found] != places).any():
        raise KnnlmError(f"{folders[0]} does not have every token of {datastore.folder}; {remedy}")
    if (saved.tokens[found] != datastore.values).any():
        raise KnnlmError(f"{folders[0]} has other tokens than {datastore.folder}; {remedy}")
    return saved.lm[found].astype(np.float32)
