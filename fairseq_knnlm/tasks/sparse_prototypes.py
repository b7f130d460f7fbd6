"""The task ``sparse_prototypes``: sentences as edits of others, and how much mass each prototype has."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import MISSING
from torch import Tensor

from ..criterions import prototype_elbo  # noqa: F401  registers the criterion
from ..data.dictionaries import dictionary_facts
from ..data.sentences import LONGEST, SentenceDataset, Sentences, load_sentences
from ..data.splits import check_dictionary_exists
from ..errors import KnnlmError
from ..models.sparse_editor import SparseEditor
from ..prototypes.embeddings import centre_of, prepared, read_embeddings


@dataclass
class SparsePrototypesConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "folder with dict.txt and binarised sentences"})
    embeddings: Optional[str] = field(
        default=None, metadata={"help": "folder of knnlm embed with the embeddings of each split: DIR/train, DIR/valid"}
    )
    prototype_split: str = field(default="train", metadata={"help": "the split whose sentences are the prototypes"})
    longest_sentence: int = field(default=LONGEST, metadata={"help": "tokens with the end; longer ones are refused"})


@register_task("sparse_prototypes", dataclass=SparsePrototypesConfig)
class SparsePrototypesTask(FairseqTask):
    """For ``sparse_editor``: a batch is some sentences with their embeddings."""

    def __init__(self, cfg: SparsePrototypesConfig, dictionary: Dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        self.prototypes: Sentences | None = None  # None: the model has none
        self.centre: np.ndarray | None = None
        self.model: SparseEditor | None = None

    @classmethod
    def setup_task(cls, cfg: SparsePrototypesConfig, **kwargs: Any) -> "SparsePrototypesTask":
        check_dictionary_exists(cfg.data)
        if cfg.longest_sentence < 2:
            raise KnnlmError(f"--longest-sentence must be 2 or more, not {cfg.longest_sentence}: a word and the end")
        return cls(cfg, Dictionary.load(str(Path(cfg.data) / "dict.txt")))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def max_positions(self) -> int:
        return self.cfg.longest_sentence

    # --- data -------------------------------------------------------------------------------------------------------

    def open_prototypes(self) -> tuple[Tensor, Tensor]:
        """Tokens (K, S) and embeddings (K, d) of the prototypes, checked against each other."""
        self.prototypes = self._sentences(self.cfg.prototype_split)
        raw = self._raw_embeddings(self.cfg.prototype_split, self.prototypes)
        self.centre = centre_of(raw)
        tokens = torch.from_numpy(self.prototypes.tokens.astype(np.int64))
        return tokens, torch.from_numpy(prepared(raw, self.centre))

    def _sentences(self, split: str) -> Sentences:
        if split == self.cfg.prototype_split and self.prototypes is not None:
            return self.prototypes
        return load_sentences(self.cfg.data, split, self.dictionary, self.cfg.longest_sentence)

    def _raw_embeddings(self, split: str, sentences: Sentences) -> np.ndarray:
        if not self.cfg.embeddings:
            raise KnnlmError("retrieval needs sentence embeddings; run knnlm embed, then give --embeddings DIR")
        digest = dictionary_facts(self.dictionary)["dictionary_sha256"]
        return read_embeddings(Path(self.cfg.embeddings) / split, sentences, digest)

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        sentences, embeddings = self._sentences(split), None
        if self.centre is not None:
            raw = self._raw_embeddings(split, sentences)
            if raw.shape[1] != len(self.centre):
                raise KnnlmError(
                    f"the embeddings of {split} have {raw.shape[1]} dimensions, those of the prototypes "
                    f"{len(self.centre)}; make both with the same LM or encoder"
                )
            embeddings = prepared(raw, self.centre)
        own = split == self.cfg.prototype_split
        self.datasets[split] = SentenceDataset(sentences, embeddings, own, self.dictionary)

    # --- training ---------------------------------------------------------------------------------------------------

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> SparseEditor:
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(model, SparseEditor):
            raise KnnlmError(f"the task sparse_prototypes is for sparse_editor, not for {type(model).__name__}")
        self.model = model
        return model

    def train_step(
        self, sample: dict, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> Any:
        prior = getattr(model, "module", model).prior
        before = (prior._sum, prior._count) if prior is not None else None
        result = super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        if ignore_grad and before is not None:  # a batch that only keeps the workers in step
            prior._sum, prior._count = before
        return result

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """After each update of the network one of lambda."""
        super().optimizer_step(optimizer, model, update_num)
        prior = getattr(model, "module", model).prior
        if prior is not None:
            prior.step()

    def reduce_metrics(self, logging_outputs: list[dict], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        prior = self.model.prior if self.model is not None else None
        if prior is not None and prior.alpha is not None:
            metrics.log_scalar("active", prior.active(), weight=0)
