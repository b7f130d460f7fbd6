"""Let an index hold the only copy of the keys."""

import logging

from ..datastore import Datastore
from ..datastore.manifest import MANIFEST, Manifest
from ..errors import KnnlmError
from ..storage import Lock, human_bytes
from .checking import verify_index
from .info import IndexInfo, index_folder, open_index, stores_exact_keys

logger = logging.getLogger(__name__)


def drop_keys(datastore: Datastore, info: IndexInfo) -> Datastore:
    """Remove the key shards of a datastore whose index holds the same keys in its lists; the datastore, opened anew.

    Everything that needs keys in corpus order reads them from the lists from then on, which is slower. The index is
    compared with its checksums and with the keys before anything goes.
    """
    folder = datastore.folder
    index = index_folder(datastore, info.name)
    with Lock(index.with_name(f"{info.name}.lock"), f"removing the keys of {folder}"):
        datastore = Datastore(folder)  # another process may have done so meanwhile
        present = datastore.manifest.keys_in_index
        if present not in (None, info.name):
            raise KnnlmError(f"the keys of {folder} are in the index {present} already, and nowhere else")
        if present is None:
            _check_holds_keys(datastore, info)
            with Lock(folder / f"{MANIFEST}.lock", f"writing {folder / MANIFEST}"):
                manifest = Manifest.load(folder)
                manifest.keys_in_index, manifest.version = info.name, Manifest.version
                manifest.save(folder)
        files = [folder / shard.keys_name for shard in datastore.shards]
        freed = sum(path.stat().st_size for path in files if path.exists())
        for path in files:
            path.unlink(missing_ok=True)  # also what a killed process left
    logger.info(f"the keys are in the index {info.name} now and nowhere else; {human_bytes(freed)} are free")
    return Datastore(folder)


def _check_holds_keys(datastore: Datastore, info: IndexInfo) -> None:
    index = open_index(datastore, info)
    key_bytes = datastore.manifest.entry_bytes - datastore.value_bytes
    if index is None or not stores_exact_keys(index, datastore) or info.code_bytes != key_bytes:
        raise KnnlmError(
            f"the index {info.name} does not hold the keys as they are stored, so they stay; build --index auto"
        )
    logger.info(f"comparing the index {info.name} with the keys before these are removed")
    if problem := verify_index(datastore, info, everything=False):
        raise KnnlmError(f"the index {info.name} is not sound ({problem}), so the keys stay")
