"""What the page shows of a text, as plain data."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..memory import DatastoreMemory, HeadMemory, Memory
from ..memory.contexts import Contexts
from ..memory.nearest import LookUp, look_up
from ..mixture.interpolation import perplexity
from ..mixture.scoring import TokenScores
from ..mixture.text import TextScorer

NEIGHBORS = 8
CONTEXT = 16
PREDICTIONS = 5
TOKENS_PER_PART = 128
OCTAVES = 3  # of the temperature's slider, to each side


class _Words:
    """Every word once; the rest are numbers."""

    def __init__(self, scorer: TextScorer):
        self._text, self._end = scorer.text, scorer.dictionary.eos()
        self._numbers: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        return self._numbers.setdefault(int(token), len(self._numbers))

    def all(self) -> list[str]:
        shown = ("\n" if token == self._end else self._text.show(token) for token in self._numbers)
        return [text.replace("\n", "\u23ce") for text in shown]


@dataclass
class Inspector:
    """Scores texts and gathers their neighbours and where those stood."""

    scorer: TextScorer
    contexts: list[Contexts]
    source: dict[str, Any] = field(default_factory=dict)  # what the page's header says of all texts: the checkpoint

    @classmethod
    def of(cls, scorer: TextScorer, **source: Any) -> "Inspector":
        contexts = [Contexts(memory.datastore, scorer.dictionary) for memory in scorer.datastores]
        return cls(scorer, contexts, source)

    def inspect(self, sequences: list[list[int]], context: int = 0, **source: Any) -> dict[str, Any]:
        """Data for the page; see numbers.js for the fields of a token.

        Args:
            context: how many tokens at the beginning are not shown
            source: what the page's header says of this text: split, first, last, total
        """
        scored = self.scorer.score(sequences).from_token(context)
        words = _Words(self.scorer)
        predictions = self._predictions(scored, words)
        stops = [_stops(memory) for memory in self.scorer.memories]
        found = [
            look_up(memory, queries, scored.tokens, temperatures, NEIGHBORS)
            if isinstance(memory, DatastoreMemory)
            else _of_head(log_probs)
            for memory, queries, temperatures, log_probs in zip(
                self.scorer.memories, scored.queries, stops, scored.memories
            )
        ]
        knn = _weighted(scored, self.scorer.memories)
        weights = None if scored.weights is None else scored.weights.tolist()
        probabilities = zip(scored.lm.double().exp().tolist(), knn, scored.mixture.double().exp().tolist())
        tokens = [
            {
                "w": words(token),
                "lm": _number(lm),
                "knn": _number(p),
                "mix": _number(mix),
                "top": predictions[place],
                "near": self._neighbors(found, place, words),
                "p": [[_number(value) for value in np.exp(store.log_probs[:, place])] for store in found],
                "z": [[_rounded(value) for value in store.log_masses[:, place]] for store in found],
                "of": [int(store.entries[place]) for store in found],
                **({} if weights is None else {"g": [_number(weight) for weight in weights[place]]}),
            }
            for place, (token, (lm, p, mix)) in enumerate(zip(scored.tokens.tolist(), probabilities))
        ]
        about = {**self._about(scored, stops), "source": {**self.source, **source}}
        return {"about": about, "words": words.all(), "tokens": tokens}

    def _about(self, scored: TokenScores, stops: list[list[float]]) -> dict[str, Any]:
        return {
            "lm": _perplexity(scored.lm),
            "mix": _perplexity(scored.mixture),
            "helped": float((scored.mixture > scored.lm).float().mean()),
            "stores": [
                {"lambda": memory.weight, "temperatures": temperatures, **_settings(memory)}
                for memory, temperatures in zip(self.scorer.memories, stops)
            ],
        }

    @torch.no_grad()
    def _predictions(self, scored: TokenScores, words: _Words) -> list[list[list[float]]]:
        """The LM's best guesses: for each token [[word, probability], ...]."""
        model, result = self.scorer.model, []
        assert scored.features is not None  # the scorer keeps them
        for features in scored.features.split(TOKENS_PER_PART):
            output = model.decoder.output_layer(features[None])  # with an adaptive softmax, the features themselves
            best = model.get_normalized_probs((output, None), log_probs=False)[0].topk(PREDICTIONS)
            for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist()):
                result.append([[words(token), _number(p)] for token, p in zip(tokens, probabilities)])
        return result

    def _neighbors(self, found: list[LookUp], place: int, words: _Words) -> list[dict[str, Any]]:
        """The nearest entries of each datastore for one token, those with the largest part of p_kNN first."""
        weights = [memory.weight for memory in self.scorer.memories]
        near = [(number, neighbor) for number, store in enumerate(found) for neighbor in store.neighbors[place]]
        near.sort(key=lambda pair: -weights[pair[0]] * pair[1].share)
        return [
            {
                "c": [words(token) for token in self.contexts[number].before(neighbor.entry, CONTEXT)],
                "w": words(neighbor.token),
                "d": float(f"{neighbor.distance:.7g}"),
                "share": _number(neighbor.share),
                "entry": neighbor.entry,
                "store": number,
                **({} if neighbor.weight == 1 else {"weight": _number(neighbor.weight)}),
            }
            for number, neighbor in near
        ]


def temperature_stops(own: float) -> list[float]:
    """The temperatures that a page can show without its server: doubles and halves, and others half-way, ascending.

    TargetMass computes a temperature and its double at the price of one, if the one is exactly twice the other.
    """
    between = float(f"{own * 2**0.5:.4g}")
    octaves = range(-OCTAVES, OCTAVES + 1)
    return sorted([own * 2.0**octave for octave in octaves] + [between * 2.0**octave for octave in octaves[:-1]])


def _stops(memory: Memory) -> list[float]:
    """The temperatures that a page can show of a memory; a head has the one that it was trained with."""
    own = 1 / memory.facts.sharpness
    return temperature_stops(memory.temperature) if isinstance(memory, DatastoreMemory) else [own]


def _of_head(log_probs: torch.Tensor) -> LookUp:
    """What a head says of n tokens: log p alone, for it has no entries. log_probs (n,)."""
    count = len(log_probs)
    own = log_probs.double().cpu().numpy()[None]
    return LookUp(own, np.zeros((1, count)), np.zeros(count, np.int64), [[] for _ in range(count)])


def _settings(memory: Memory) -> dict[str, Any]:
    """What the page's header says of a memory."""
    if isinstance(memory, HeadMemory):
        of_head = {"name": memory.name, "rows": len(memory.head.rows), "kind": memory.identity.get("kind", "")}
        return {**of_head, "temperature": memory.temperature, "metric": memory.head.metric}
    assert isinstance(memory, DatastoreMemory)  # the page has no cache
    return {
        "name": memory.name,
        "entries": len(memory.datastore),
        "temperature": memory.temperature,
        "k": memory.k or "all",
        "metric": memory.metric,
        **{name: memory.identity[name] for name in ("index", "nprobe", "far") if name in memory.identity},
    }


def _weighted(scored: TokenScores, memories: list[Memory]) -> list[float]:
    """p of the memories together: the mean by their weights."""
    if scored.weights is not None:
        shares = scored.weights.double() / scored.weights.double().sum(dim=1, keepdim=True).clamp(min=1e-300)
        return (shares * torch.stack([p.double().exp().cpu() for p in scored.memories], dim=1)).sum(dim=1).tolist()
    total = sum(memory.weight for memory in memories)
    if not total:
        return [0.0] * len(scored.tokens)
    parts = [memory.weight / total * p.double().exp().cpu() for memory, p in zip(memories, scored.memories)]
    return torch.stack(parts).sum(dim=0).tolist()


def _perplexity(log_probs: torch.Tensor) -> float:
    return perplexity(log_probs.double().mean().item())


def _number(value: float) -> float:
    """Six digits: nobody reads more, and a perplexity that the page computes from them is right to the fifth."""
    return float(f"{value:.6g}")


def _rounded(value: float) -> float:
    """A logarithm, so that what it is the logarithm of has four digits."""
    return round(float(value), 5)
