"""The criterion ``prototype_elbo``: minus the evidence lower bound of the neural editor, with n prototypes a sentence.

    - E_q(t, z) [log p(x|t, z)] + KL(z) + w KL(q(t|x) || E_q[log theta]) + KL(q(theta) || p(theta)) / N

The editor and the edit encoder get their gradients through the samples, W through REINFORCE, whose baseline is the mean
of the other samples, and through the KL of t, which is exact. w grows from 0 to 1. KL(z) and KL(theta) have no
gradient, but belong to the bound. Validation is the bound itself, w = 1.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from omegaconf import II
from torch import Tensor

from ..errors import KnnlmError
from ..prototypes.retriever import reinforce_loss, retrieval_kl

SUMS = ("loss", "nll_loss", "neg_elbo", "kl_t", "kl_z", "kl_theta")  # over the sentences of a batch


@dataclass
class PrototypeELBOConfig(FairseqDataclass):
    prototype_samples: int = field(default=2, metadata={"help": "n, prototypes drawn for each sentence of a batch"})
    prototype_warmup: int = field(
        default=0, metadata={"help": "updates over which the weight of the KL of t grows from 0 to 1"}
    )
    prototype_free_bits: float = field(
        default=0.0, metadata={"help": "nats of the KL of t, per sentence, that cost nothing in training"}
    )
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("prototype_elbo", dataclass=PrototypeELBOConfig)
class PrototypeELBO(FairseqCriterion):
    """For ``sparse_editor``; without prototypes it is the cross-entropy."""

    def __init__(self, task: Any, samples: int, warmup: int, free_bits: float, sentence_avg: bool):
        super().__init__(task)
        self.samples, self.warmup, self.free_bits, self.sentence_avg = samples, warmup, free_bits, sentence_avg

    @classmethod
    def build_criterion(cls, cfg: PrototypeELBOConfig, task: Any) -> "PrototypeELBO":
        if not hasattr(task, "open_prototypes"):
            raise KnnlmError("--criterion prototype_elbo needs --task sparse_prototypes, which reads the prototypes")
        if cfg.prototype_samples < 1:
            raise KnnlmError(f"--prototype-samples must be 1 or more, not {cfg.prototype_samples}; 2 have a baseline")
        if cfg.prototype_warmup < 0 or cfg.prototype_free_bits < 0:
            raise KnnlmError("--prototype-warmup and --prototype-free-bits must be 0 or more")
        return cls(task, cfg.prototype_samples, cfg.prototype_warmup, cfg.prototype_free_bits, cfg.sentence_avg)

    def kl_weight(self, updates: int) -> float:
        """w, after so many updates."""
        return 1.0 if updates >= self.warmup else updates / self.warmup

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The loss, how many tokens (or sentences) it is of, and what to log."""
        output = model(**sample["net_input"], samples=self.samples)
        nll = -output.log_likelihood.mean(dim=1)  # (B,)
        count, zero = len(nll), torch.zeros_like(nll)
        kl_t, kl_z, kl_theta, loss = zero, 0.0, 0.0, nll
        if output.log_q is not None:
            inner = getattr(model, "module", model)
            if inner.prior.concentration.dtype != torch.float64:
                raise KnnlmError("the mass of the prototypes does not fit into half precision; leave out --fp16")
            log_q = output.log_q
            kl_t = retrieval_kl(log_q, inner.prior.log_prior().to(log_q.device))
            kl_z, kl_theta = inner.edits.kl, inner.prior.kl() / inner.prior.sentences
            reinforced = reinforce_loss(log_q.gather(1, output.chosen), output.log_likelihood)
            # The surrogate has a gradient and no meaning as a number, so its value is taken off again.
            paid = kl_t.clamp(min=self.free_bits)
            loss = nll + kl_z + self.kl_weight(inner.num_updates) * paid + kl_theta + reinforced - reinforced.detach()
            if model.training:
                inner.prior.observe(log_q.detach().exp())
        elbo = (nll + kl_t).sum() + count * (kl_z + kl_theta)
        if not model.training:
            loss = nll + kl_t + kl_z + kl_theta
        sample_size = sample["nsentences"] if self.sentence_avg else sample["ntokens"]
        logged = {
            "loss": loss.sum().data, "nll_loss": nll.sum().data, "neg_elbo": elbo.data, "kl_t": kl_t.sum().data,
            "kl_z": count * kl_z, "kl_theta": count * kl_theta, "ntokens": sample["ntokens"],
            "nsentences": count, "sample_size": sample_size,
        }  # fmt: skip
        return loss.sum() if reduce else loss, sample_size, logged

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        total = {
            name: float(sum(log.get(name, 0) for log in logging_outputs))
            for name in (*SUMS, "ntokens", "nsentences", "sample_size")
        }
        tokens, sentences = max(total["ntokens"], 1), max(total["nsentences"], 1)
        loss = total["loss"] / max(total["sample_size"], 1) / math.log(2)
        metrics.log_scalar("loss", loss, total["sample_size"], round=3)
        metrics.log_scalar("nll_loss", total["nll_loss"] / tokens / math.log(2), tokens, round=3)
        metrics.log_scalar("neg_elbo", total["neg_elbo"] / tokens / math.log(2), tokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["neg_elbo"].avg))
        for name in ("kl_t", "kl_z", "kl_theta"):
            metrics.log_scalar(name, total[name] / sentences, sentences, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
