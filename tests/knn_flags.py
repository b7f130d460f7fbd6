"""Flags and index records, as they come to what opens memories."""

from fairseq_knnlm.index import IndexInfo
from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig


def flags(**given) -> KNNLanguageModelingConfig:
    return KNNLanguageModelingConfig(**{f"knn_{name}": value for name, value in given.items()})


def index(factory: str | None, temperature: float | None = 7.5) -> IndexInfo:
    return IndexInfo("name", "spec", factory, "l2", 1000, 64, "a", temperature=temperature)
