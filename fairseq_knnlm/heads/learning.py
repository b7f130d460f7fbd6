"""Training a head: steps over the pairs of a datastore, validation, stopping, and going on after a kill."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..progress import progress
from .clusters import ClusterWords
from .head import Head
from .learning_state import LearningState
from .objective import Objective, mix
from .pairs import Batch, ShuffledPairs
from .row_adam import RowAdam
from .rows import RowLayout
from .softmax import Sampler, logits, row_log_probs

logger = logging.getLogger(__name__)

FULL_ROWS = 8192  # up to which the softmax is over all rows
WARM_UP = 0.02  # of all steps, in which the learning rate rises
TRUNK_RATE = 0.1  # of the learning rate: projections and layers are shared by all words, and dense
PATIENCE = 3  # validations without improvement, after which training stops


@dataclass
class Plan:
    """How a head is trained."""

    epochs: float = 1.0
    rate: float = 0.01  # of the learning; for rows in units of the logit that they change
    seed: int = 1
    negatives: int = 0  # words drawn in a step; 0: the softmax is over all rows
    train_rows: bool = True
    interval: int = 2000  # steps between validations, each of which can be gone on from


@dataclass
class Validation:
    """Tokens that tell when to stop."""

    keys: Tensor  # (n, dim)
    targets: Tensor  # (n,)
    lm: Tensor | None = None  # (n,) log p_LM, where the mixture counts
    weight: float = 0.0

    def loss(self, head: Head) -> float:
        """Mean, in nats, over all rows."""
        log_probs = head.target_log_probs(self.keys, self.targets)
        if self.lm is not None:
            log_probs = mix(self.lm, log_probs, self.weight)
        return -float(log_probs.double().clamp(min=-1e4).mean())


@dataclass
class Learning:
    """The training of one head."""

    head: Head
    pairs: ShuffledPairs
    objective: Objective
    plan: Plan
    frequencies: np.ndarray  # of the words, or of the clusters
    validation: Validation | None = None
    cluster: Tensor | None = None  # (entries,) of each entry, where the head is of clusters
    results: list[dict[str, Any]] = field(default_factory=list)  # of each validation

    def __post_init__(self) -> None:
        self.total = max(1, math.ceil(self.plan.epochs * self.pairs.steps))
        self.adams = {"rows": RowAdam(self.head.rows)} if self.plan.train_rows else {}
        for name, parameter in self.head.trunk.named_parameters():
            parameter.requires_grad_(True)
            self.adams[f"trunk.{name}"] = RowAdam(parameter.data)
        layout = self.head.words
        if isinstance(layout, ClusterWords):
            layout = RowLayout(torch.ones(len(layout), dtype=torch.long))
        self._layout, self._sampler = layout, None
        if self.plan.negatives:
            numbers = (self.pairs.batch, self.plan.negatives, self.plan.seed)
            self._sampler = Sampler(layout, self.frequencies, *numbers)

    def describe(self) -> str:
        """What will be done."""
        softmax = f"all {self._layout.total:,} rows"
        if self._sampler is not None:
            softmax = (
                f"sampled: of {self._layout.total:,} rows those of the batch and of {self.plan.negatives:,} words "
                "drawn by frequency; validation is over all rows"
            )
        return (
            f"{self.total:,} steps of {self.pairs.batch:,} pairs ({self.plan.epochs:g} epochs), "
            f"{self.objective.name}; softmax: {softmax}"
        )

    def run(self, state: LearningState) -> None:
        """Train to the end, or until validation says that it gets no better. The best head is kept."""
        step, losses = state.restore(self), []
        with progress("learning", self.total, " steps", done=step) as bar:
            while step < self.total and not state.is_over(PATIENCE):
                epoch, first = divmod(step, self.pairs.steps)
                for batch in self.pairs.batches(epoch, first):
                    losses.append(self.step(step, batch))
                    step += 1
                    bar.update()
                    if step % self.plan.interval == 0 or step == self.total:
                        self._look(state, step, float(np.mean(losses)))
                        losses = []
                    if step == self.total or state.is_over(PATIENCE):
                        break
        state.take_best(self)

    def _look(self, state: LearningState, step: int, loss: float) -> None:
        """Validate, say how it goes, and keep everything."""
        result: dict[str, Any] = {"step": step, "loss": round(loss, 5)}
        text = f"step {step:,} of {self.total:,}: training loss {loss:.4f}"
        valid = None
        if self.validation is not None:
            valid = self.validation.loss(self.head)
            result["valid"] = round(valid, 5)
            what = "head" if self.validation.lm is None else "mixture"
            text += f", perplexity of the {what} on {len(self.validation.targets):,} validation tokens "
            text += f"{math.exp(min(valid, 700)):.2f}"
        logger.info(text)
        self.results.append(result)
        state.keep(self, step, valid)

    def rate_at(self, step: int) -> float:
        """It rises at first, then falls to nothing in a straight line."""
        warm = max(1, round(WARM_UP * self.total))
        return self.plan.rate * min((step + 1) / warm, (self.total - step) / max(1, self.total - warm))

    def step(self, number: int, batch: Batch) -> float:
        """One step; the loss before it."""
        weights, loss, rows = self.loss_of(number, batch)
        loss.backward()
        rate = self.rate_at(number)
        if weights.grad is not None:
            # So that the rate is in units of logits, whatever the temperature.
            scale = self.head.temperature / (1.0 if self.head.metric == "ip" else 2.0)
            self.adams["rows"].step(weights.grad, rate * scale, rows)
        for name, parameter in self.head.trunk.named_parameters():
            if parameter.grad is not None:
                self.adams[f"trunk.{name}"].step(parameter.grad, TRUNK_RATE * rate)
                parameter.grad = None
        return float(loss.detach())

    def loss_of(self, number: int, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """The rows that take part in a step, its loss, and which rows they are; None: all."""
        if isinstance(self.head.words, ClusterWords):
            return self._loss_of_clusters(number, batch, self.head.words)
        others, shares = None, None
        own = batch.targets[:, None]
        if self.objective.neighbors is not None:
            others, shares = self.objective.neighbors.of(batch.entries, batch.targets)
            own = torch.cat([own, others], dim=1)
        rows, offsets = None, None
        if self._sampler is None:
            columns, missing = self._layout.columns(own)
        else:
            drawn = self._sampler.draw(number, batch.targets, others)
            columns, missing = drawn.columns(own)
            rows, offsets = drawn.rows, drawn.offsets(columns)
        weights = self._leaf(rows)
        states, log_weights = self.head.trunk(batch.keys)
        place = (self.head.metric, self.head.temperature, offsets, columns, missing)
        parts = [row_log_probs(state, weights, *place) for state in states]
        log_probs = parts[0]
        if log_weights is not None:
            log_probs = (torch.stack(parts, dim=2) + log_weights[:, None]).logsumexp(dim=2)
        return weights, self.objective.loss(log_probs, batch.entries, shares), rows

    def _loss_of_clusters(
        self, number: int, batch: Batch, words: ClusterWords
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As ``loss_of``: the candidates are clusters, and those that hold the target share in its probability."""
        assert self.cluster is not None  # known where clusters are trained
        own = self.cluster[batch.entries]
        rows, offsets, some = None, None, torch.arange(len(words))
        if self._sampler is not None:
            drawn = self._sampler.draw(number, own)
            rows, some = drawn.rows, drawn.words
            offsets = drawn.offsets(drawn.columns(own[:, None])[0])
        weights = self._leaf(rows)
        scores = logits(batch.keys, weights, self.head.metric, self.head.temperature, offsets)
        log_shares = words.table(some, batch.targets).log()
        log_probs = (scores + log_shares).logsumexp(dim=1) - scores.logsumexp(dim=1)
        return weights, self.objective.loss(log_probs[:, None], batch.entries, None), rows

    def _leaf(self, rows: Tensor | None) -> Tensor:
        """The rows of a step, with a gradient of their own."""
        weights = self.head.rows if rows is None else self.head.rows.index_select(0, rows)
        return weights.detach().requires_grad_(self.plan.train_rows)
