"""Tuned values in the folders of the datastores: written by ``knnlm tune --keep``, read where a save is looked at."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ..datastore import Datastore
from ..datastore.tuned import TunedValues, keep_tuned, read_tuned
from ..errors import KnnlmError
from ..heads.head_file import HEAD, read_head_facts
from ..memory import MemoryFacts
from ..storage.writer import plain
from .scores import SavedScores
from .settings import Settings

SCORE_AGAIN = "score again with this release, or say where it is with --datastore"


def keep_settings(
    saved: SavedScores, settings: Settings, perplexity: float, tried: int, folders: list[str] | None = None
) -> list[Path]:
    """Store what was found for the mixture of a save in each of its datastores; the files.

    Args:
        perplexity: of the mixture with these settings
        tried: how many settings were compared
        folders: of the datastores, where they are not where the run found them
    """
    if not (saved.knn_memories or saved.heads):
        raise KnnlmError("there is no datastore to keep the values in; give the flags above when scoring")
    places = _folders(saved, folders)
    heads = head_weights(saved, settings)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    keys = [memory.identity["keys"] for memory in saved.knn_memories]
    written = []
    # With heads alone, each keeps the values of all of them; beside datastores, the datastores do.
    keepers = saved.knn_memories or saved.heads
    for number, (memory, folder) in enumerate(zip(keepers, places)):
        values = TunedValues(
            keys=memory.identity["head" if memory.is_head else "keys"],
            weight=settings.weights[number],
            temperature=1 / memory.sharpness if memory.is_head else settings.temperatures[number],
            k=None if memory.neighbors is None else settings.k,
            metric=memory.identity["metric"],
            score=memory.identity.get("score", "exact"),
            beside=[] if memory.is_head else sorted(keys[:number] + keys[number + 1 :]),
            search={name: value for name, value in memory.identity.items() if name not in ("keys", "metric", "score")},
            split=saved.run.source["split"],
            tokens=len(saved),
            perplexity=plain(perplexity),
            settings=tried,
            when=now,
            heads=heads,
        )
        if saved.cache:
            values = replace(
                values, cache_size=settings.cache_size, cache_weight=settings.weights[-1], theta=settings.theta
            )
        written.append(keep_tuned(folder, values))
    return written


def head_weights(saved: SavedScores, settings: Settings) -> dict[str, float]:
    """Lambda of each head, by its fingerprint."""
    first = len(saved.knn_memories)
    return {head.identity["head"]: settings.weights[first + number] for number, head in enumerate(saved.heads)}


def _folders(saved: SavedScores, folders: list[str] | None) -> list[Path]:
    """Where the datastores of a save are, or its heads where there is none, each checked to be what was scored with."""
    if not saved.knn_memories:
        return [_head_folder(memory) for memory in saved.heads]
    memories = saved.knn_memories
    if folders is not None and len(folders) != len(memories):
        raise KnnlmError(f"--datastore names {len(folders)} datastores, but the save has {len(memories)}; give each")
    places = []
    for number, memory in enumerate(memories):
        folder = folders[number] if folders else memory.folder
        if folder is None:
            raise KnnlmError(f"the save does not say where the datastore {memory.name} is; {SCORE_AGAIN}")
        if Datastore(folder).fingerprint != memory.identity["keys"]:
            raise KnnlmError(f"{folder} is not the datastore that the save was made with; {SCORE_AGAIN}")
        places.append(Path(folder))
    return places


def _head_folder(memory: MemoryFacts) -> Path:
    folder = Path(memory.folder or "")
    if not (folder / HEAD).exists() or read_head_facts(folder).fingerprint != memory.identity["head"]:
        raise KnnlmError(f"{folder} is not the head that the save was made with; score again with --knn-head")
    return folder


def kept_settings(saved: SavedScores) -> tuple[Settings, str] | None:
    """What was kept for the very mixture of a save, and where that comes from; None: nothing that fits."""
    knn, cache = saved.knn_memories, saved.cache
    keys = [memory.identity.get("keys") for memory in knn]
    found = []
    for number, memory in enumerate(knn or saved.heads):
        values = _read(memory)
        beside = [] if memory.is_head else sorted(map(str, keys[:number] + keys[number + 1 :]))
        heads = {head.identity["head"] for head in saved.heads}
        fitting = [each for each in values if (each.beside, set(each.heads)) == (beside, heads)]
        fitting = [each for each in fitting if _fits(each, memory, cache)]
        if not fitting:
            return None
        found.append(fitting[-1])
    if not found or len({each.when for each in found}) > 1:
        return None
    own = Settings.of_run(saved)
    weights = [each.weight for each in found] if knn else []
    weights += [float(found[0].heads[head.identity["head"]]) for head in saved.heads]
    weights += [found[0].cache_weight] if cache else []
    settings = replace(
        own,
        weights=tuple(weights),
        k=found[0].k or own.k,
        temperatures=tuple(each.temperature for each in found) if knn else (),
        cache_size=found[0].cache_size if cache else None,
        theta=found[0].theta if cache else 0.0,
    )
    return settings, found[0].origin


def _read(memory: MemoryFacts) -> list[TunedValues]:
    if memory.folder is None or not Path(memory.folder).is_dir():  # of an older release, or moved
        return []
    return read_tuned(Path(memory.folder), memory.identity["head" if memory.is_head else "keys"])


def _fits(values: TunedValues, memory: MemoryFacts, cache: MemoryFacts | None) -> bool:
    """Whether values are for this mixture, and the save can tell of them."""
    same = (values.metric, values.score) == (memory.identity["metric"], memory.identity.get("score", "exact"))
    if not same or (values.cache_size is None) != (cache is None) or (values.k is None) != (memory.neighbors is None):
        return False
    if cache is not None and cache.neighbors is not None and (values.cache_size or 0) > cache.neighbors:
        return False
    if memory.neighbors is not None:
        return (values.k or 0) <= memory.neighbors
    return any(abs(saved / values.temperature - 1) < 1e-3 for saved in memory.saved_temperatures)
