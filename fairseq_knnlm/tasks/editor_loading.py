"""A trained neural editor with its prototypes, outside of fairseq-train."""

from dataclasses import dataclass

import numpy as np
import torch
from fairseq import checkpoint_utils

from ..data.sentences import Sentences
from ..errors import KnnlmError
from ..models.sparse_editor import SparseEditor
from ..prototypes.prototype_set import PrototypeSet, select_prototypes
from .checkpoint_errors import one_sentence_for
from .sparse_prototypes import SparsePrototypesTask


@dataclass
class LoadedEditor:
    """A model and the data it was trained on."""

    task: SparsePrototypesTask
    model: SparseEditor

    def prototypes(self, count: int | None = None) -> PrototypeSet:
        """All prototypes, or the ``count`` best."""
        if self.model.prior is None or self.task.prototypes is None:
            raise KnnlmError("this model has no prototypes (--prototype-prior none); give another checkpoint")
        return select_prototypes(
            self.task.prototypes, self.model.prototype_embeddings.cpu(), self.model.prior, count
        )

    def split(self, name: str, limit: int | None = None) -> tuple[Sentences, np.ndarray]:
        """The first sentences of a split, and their embeddings (n, d); (n, 0) where the model needs none."""
        if limit is not None and limit < 1:
            raise KnnlmError(f"--sentences must be 1 or more, not {limit}")
        self.task.load_dataset(name)
        dataset = self.task.datasets[name]
        numbers = np.arange(min(len(dataset), limit or len(dataset)))
        embeddings = dataset.embeddings
        rows = dataset.sentences.rows(numbers)
        return rows, np.empty((len(numbers), 0), np.float32) if embeddings is None else embeddings[numbers]


def load_editor(path: str, data: str, embeddings: str | None) -> LoadedEditor:
    """A checkpoint of ``sparse_editor``, with the data and the embeddings that it was trained on."""
    advice = "give a checkpoint of --arch sparse_editor, and the data that it was trained on"
    with one_sentence_for(path, advice):
        overrides = {"data": data, **({"embeddings": embeddings} if embeddings else {})}
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], overrides)
    if not isinstance(model, SparseEditor):
        raise KnnlmError(f"{path} is a {type(model).__name__}, not a sparse_editor; give another checkpoint")
    if torch.cuda.is_available():
        model = model.cuda()
    model.eval()
    return LoadedEditor(task, model)
