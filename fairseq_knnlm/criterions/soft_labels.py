"""The criterion ``soft_labels``: part of the loss is the cross-entropy with a distribution instead of the token.

    loss = (1 - w) * -log p(token) + w * -sum over tokens y of q(y) log p(y)

q is an LM's distribution, that of the nearest neighbours, or a mixture (Xu et al. 2023, appendix E). Of the LM only the
most probable tokens are stored. The mass of all others is one more outcome, "none of these", whose probability is
1 - sum of p over the stored ones: so q and p are compared as far as q is known, and nothing is assumed about the rest.
Renormalising the stored tokens instead would teach the model to be surer than q is.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.constants import DDP_BACKEND_CHOICES
from omegaconf import II
from torch import Tensor

from ..errors import KnnlmError
from ..mixture.output_layer import log_probs_of
from .label_sources import open_labels

LARGEST = 1 - 1e-6  # sum of probabilities, so that "none of these" has a logarithm


@dataclass
class SoftLabelsConfig(FairseqDataclass):
    soft_labels: Optional[str] = field(
        default=None,
        metadata={"help": "a save of train with --knn-save-top: the LM's labels (DIR, or the parts of a run: DIR,DIR)"},
    )
    soft_neighbors: Optional[str] = field(
        default=None, metadata={"help": "a table of knnlm neighbors for train: labels of the nearest neighbours"}
    )
    soft_weight: float = field(
        default=0.5, metadata={"help": "share of the loss that is the cross-entropy with the labels"}
    )
    soft_lambda: Optional[float] = field(
        default=None, metadata={"help": "of both kinds of labels, the neighbours' share (default: 0.25)"}
    )
    soft_temperature: Optional[float] = field(
        default=None,
        metadata={"help": "of the neighbours' labels (default: one at the scale of the table's distances)"},
    )
    sentence_avg: bool = II("optimization.sentence_avg")
    ddp_backend: DDP_BACKEND_CHOICES = II("distributed_training.ddp_backend")  # noqa: RUF009  fairseq's own way


@register_criterion("soft_labels", dataclass=SoftLabelsConfig)
class SoftLabelsCriterion(FairseqCriterion):
    """Cross-entropy with the token and with its soft label; validation is with the token alone."""

    def __init__(self, task: Any, weight: float, lm_columns: int, sentence_avg: bool):
        """lm_columns: how many of a label's tokens are the LM's, which come first"""
        super().__init__(task)
        self.weight, self.lm_columns, self.sentence_avg = weight, lm_columns, sentence_avg

    @classmethod
    def build_criterion(cls, cfg: SoftLabelsConfig, task: Any) -> "SoftLabelsCriterion":
        if not hasattr(task, "soft_labels"):
            raise KnnlmError("--criterion soft_labels needs --task knn_language_modeling, which reads the labels")
        if not 0 <= cfg.soft_weight <= 1:
            raise KnnlmError(f"--soft-weight must be between 0 and 1, not {cfg.soft_weight:g}")
        adaptive = any(getattr(model.decoder, "adaptive_softmax", None) is not None for model in task.models)
        if adaptive and str(cfg.ddp_backend) in ("c10d", "pytorch_ddp"):
            raise KnnlmError("an adaptive softmax does not train with --ddp-backend pytorch_ddp; use legacy_ddp")
        labels = open_labels(cfg.soft_labels, cfg.soft_neighbors, cfg.soft_lambda, cfg.soft_temperature)
        task.soft_labels = labels  # who puts the labels of a block beside it when it loads the text
        return cls(task, cfg.soft_weight, labels.lm_columns, cfg.sentence_avg)

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The loss, how many tokens (or blocks) it is of, and what to log."""
        features, _ = model(**sample["net_input"], features_only=True)
        own = sample["target"] != self.padding_idx
        targets = sample["target"][own][:, None]  # (n, 1)
        if model.training and "soft_labels" not in sample:
            raise KnnlmError(
                f"the soft labels are of the split {self.task.soft_labels.split}, which is not what is trained on; "
                "give --train-subset that one"
            )
        if model.training and self.weight > 0:
            labels = sample["soft_labels"]
            log_probs = log_probs_of(model.decoder, features[own], torch.cat([targets, labels["tokens"]], dim=1))
            hard = -log_probs[:, 0]
            soft = self.cross_entropy(log_probs[:, 1:], labels["probs"], labels["rest"])
            losses = (1 - self.weight) * hard + self.weight * soft
        else:
            hard = losses = -log_probs_of(model.decoder, features[own], targets)[:, 0]
        sample_size = sample["target"].size(0) if self.sentence_avg else len(targets)
        loss = losses.sum() if reduce else losses
        logged = {"loss": loss.data, "nll_loss": hard.sum().data, "ntokens": len(targets)}
        return loss, sample_size, {**logged, "nsentences": sample["target"].size(0), "sample_size": sample_size}

    def cross_entropy(self, log_probs: Tensor, probs: Tensor, rest: Tensor) -> Tensor:
        """Of the model with labels: log p of their tokens (n, k), probabilities (n, k) and the rest's (n,) -> (n,)."""
        listed = -(probs * log_probs).sum(dim=1)
        if not self.lm_columns:
            return listed
        known = log_probs[:, : self.lm_columns].exp().sum(dim=1)
        return listed - rest * torch.log1p(-known.clamp(max=LARGEST))

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        LabelSmoothedCrossEntropyCriterion.reduce_metrics(logging_outputs)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
