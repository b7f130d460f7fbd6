"""What ``knnlm tune --keep`` found, kept in the folder of the datastore: ``DIR/tuned.json``.

The best weight and temperature depend on the other memories of the mixture, on the metric, and on whether k neighbours
or all visited entries take part. So there is one set of values for each such setting, and they are used there only.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import KnnlmError
from ..storage import Lock, from_record, write_record
from ..storage.records import read_record

FORMAT = "fairseq-knnlm tuned values"
VERSION = 1
TUNED = "tuned.json"


@dataclass
class TunedValues:
    """The best values for one datastore in one mixture, and where they come from."""

    keys: str  # fingerprint of the datastore that they are for
    weight: float  # lambda
    temperature: float
    k: int | None  # None: every visited entry
    metric: str
    score: str  # --knn-score: exact distances, or the index's
    beside: list[str]  # fingerprints of the other datastores in the mixture, sorted
    search: dict[str, Any]  # index, nprobe and the rest of what decided which neighbours were found
    split: str  # that was tuned on
    tokens: int
    perplexity: float | str  # of the mixture, on these tokens; "inf" where that is infinite
    settings: int  # how many were compared
    when: str  # UTC, to the second: all datastores of a mixture have the same
    cache_size: int | None = None  # None: without a cache
    cache_weight: float = 0.0
    theta: float = 0.0
    heads: dict[str, float] = field(default_factory=dict)  # lambda of each head of the mixture, by its fingerprint

    @property
    def place(self) -> tuple[Any, ...]:
        """The setting that they are for; newer values for the same replace them."""
        heads = sorted(self.heads)
        return (self.keys, self.beside, heads, self.cache_size is None, self.metric, self.score, self.k is None)

    @property
    def origin(self) -> str:
        return f"tuned on {self.split} ({self.when[:10]})"


def read_tuned(folder: Path, keys: str) -> list[TunedValues]:
    """What is kept for the datastore with these keys, the newest last."""
    return [values for values in _read(folder / TUNED) if values.keys == keys]


def keep_tuned(folder: Path, values: TunedValues) -> Path:
    """Add values to those of a datastore; where they are."""
    path = folder / TUNED
    with Lock(folder / f"{TUNED}.lock", f"writing {path}"):
        others = [old for old in _read(path) if old.place != values.place]
        content = {"format": FORMAT, "version": VERSION, "values": [asdict(each) for each in (*others, values)]}
        write_record(path, content)
    return path


def _read(path: Path) -> list[TunedValues]:
    if not path.exists():
        return []
    remedy = f"delete {path}, and run knnlm tune --keep again if you want tuned values"
    content = read_record(path, remedy)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise KnnlmError(f"{path} is not of a kind that this fairseq-knnlm reads; {remedy}")
    values = content.get("values")
    if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
        raise KnnlmError(f"{path} is damaged (it lists no values); {remedy}")
    found = [from_record(TunedValues, each, path, remedy) for each in values]
    for each in found:
        if not (0 <= each.weight <= 1 and 0 <= each.cache_weight <= 1 and each.temperature > 0 and each.theta >= 0):
            raise KnnlmError(f"{path} is damaged (lambda {each.weight}, temperature {each.temperature}); {remedy}")
    return found
