"""Training a gate on a saved run: maximum likelihood of the mixture, stopped by text that it was not trained on.

The text is cut into contiguous blocks. Eight of ten are trained on, one of ten says when to stop, and the last one
decides whether the gate is any better than constant weights: if it is not, the constants are kept.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..mixture.gate import Gate, GateFacts, masked, standardise
from .gate_data import GateData

UNITS = 32  # of the hidden layer
BLOCKS, PERIOD = 200, 10  # the text is cut into so many blocks; of ten in a row one stops, one certifies
LEARNING_RATE, DECAY = 2e-3, 1e-4
BATCH, EPOCHS, PATIENCE = 512, 100, 10
LEARNT = ("bias", "linear", "hidden", "hidden_bias", "output")  # the parameters of a network
SMALLEST_WEIGHT = 1e-6  # of a memory that constant weights leave out: a gate may still find use for it


def split_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which of so many tokens are trained on, stop the training, and certify its result: contiguous blocks of each."""
    block = torch.arange(count) * BLOCKS // max(1, count)
    place = block % PERIOD
    parts = (place < PERIOD - 2, place == PERIOD - 2, place == PERIOD - 1)
    trained, stopping, held_out = (part.nonzero()[:, 0] for part in parts)
    return trained, stopping, held_out


class Network(torch.nn.Module):
    """b + A x + C tanh(B x + d), which begins as the constant weights."""

    def __init__(self, features: int, weights: np.ndarray, units: int, generator: torch.Generator):
        """weights (1 + memories,): the constant ones."""
        super().__init__()
        members = len(weights)
        start = torch.from_numpy(np.log(np.maximum(weights, SMALLEST_WEIGHT))).float()
        self.bias = torch.nn.Parameter(start)
        self.linear = torch.nn.Parameter(torch.zeros(members, features))
        spread = features**-0.5
        self.hidden = torch.nn.Parameter(torch.randn(units, features, generator=generator) * spread)
        self.hidden_bias = torch.nn.Parameter(torch.randn(units, generator=generator) * spread)
        self.output = torch.nn.Parameter(torch.zeros(members, units))

    def forward(self, scaled: Tensor, missing: Tensor) -> Tensor:
        """(n, features), (n, memories) bool -> log of the weights (n, 1 + memories)."""
        hidden = torch.tanh(scaled @ self.hidden.T + self.hidden_bias)
        return masked(self.bias + scaled @ self.linear.T + hidden @ self.output.T, missing).log_softmax(dim=1)


def train_gate(
    data: GateData,
    facts: GateFacts,
    seed: int = 1,
    told: Callable[[int, float], None] | None = None,
) -> Gate:
    """A gate that is not worse than the constant weights on text that neither saw.

    Args:
        facts: with the constant weights; what is learnt is filled in
        told: is told of each epoch and the loss after it, on the part that stops the training
    """
    trained, stopping, held_out = (data.rows(rows) for rows in split_rows(len(data)))
    means, scales = _scaling(trained.features)
    kept = constant_gate(facts)
    varying = (scales > 0).nonzero()[:, 0]
    if len(varying) == 0:
        return kept
    names = [data.names[place] for place in varying.tolist()]
    means, scales = means[varying], scales[varying]
    generator = torch.Generator().manual_seed(seed)
    network = Network(len(names), constant_weights(facts), UNITS, generator)
    scaled, scaled_stopping = (_scaled(part, varying, means, scales) for part in (trained, stopping))
    learnt: dict[str, Any] = _fit(network, scaled, scaled_stopping, generator, told)
    learnt = {name: weights.double().tolist() for name, weights in learnt.items()}
    gate = Gate(replace(facts, features=names, means=means.tolist(), scales=scales.tolist(), **learnt))
    ours = held_out.loss(gate.log_weights_of(held_out.features[:, varying], held_out.missing))
    theirs = held_out.loss(kept.log_weights_of(held_out.features[:, :0], held_out.missing))
    return gate if ours <= theirs else kept


def constant_weights(facts: GateFacts) -> np.ndarray:
    """The best constant weights of LM and memories, (1 + memories,)."""
    weights = [memory.weight for memory in facts.memories]
    return np.array([1 - sum(weights), *weights])


def constant_gate(facts: GateFacts) -> Gate:
    """A gate that always gives the best constant weights."""
    bias = np.log(np.maximum(constant_weights(facts), 1e-12)).tolist()
    nothing: dict[str, Any] = {name: [] for name in ("features", "means", "scales", *LEARNT)}
    return Gate(replace(facts, **nothing | {"bias": bias}))


def _scaling(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature where it is known, (features,) each; 0 where it never varies."""
    known = features.isfinite()
    count = known.sum(dim=0).clamp(min=1)
    means = features.masked_fill(~known, 0).sum(dim=0) / count
    deviations = (features - means).masked_fill(~known, 0).square().sum(dim=0).div(count).sqrt()
    return means, torch.where(deviations > 1e-6 * means.abs().clamp(min=1e-6), deviations, 0.0)


def _scaled(data: GateData, varying: Tensor, means: Tensor, scales: Tensor) -> GateData:
    """In single precision, which is enough for learning."""
    scaled = standardise(data.features[:, varying], means, scales).float()
    return GateData(data.log_probs.float(), scaled, data.missing, [data.names[place] for place in varying.tolist()])


def _fit(
    network: Network,
    trained: GateData,
    stopping: GateData,
    generator: torch.Generator,
    told: Callable[[int, float], None] | None,
) -> dict[str, Tensor]:
    """The parameters at the epoch after which the loss on ``stopping`` was least."""
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, weight_decay=DECAY)

    def look() -> float:
        with torch.no_grad():
            return float(stopping.loss(network(stopping.features, stopping.missing)))

    least, best, since = look(), _copy(network), 0
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(trained), generator=generator).split(BATCH):
            batch = trained.rows(rows)
            optimizer.zero_grad()
            batch.loss(network(batch.features, batch.missing)).backward()
            optimizer.step()
        loss = look()
        if told is not None:
            told(epoch, loss)
        since += 1
        if loss < least:
            least, best, since = loss, _copy(network), 0
        if since >= PATIENCE:
            break
    return best


def _copy(network: Network) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}

