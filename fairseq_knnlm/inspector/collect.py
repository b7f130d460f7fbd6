"""What the page shows of a text, as plain data."""

from dataclasses import dataclass
from typing import Any

import torch
from fairseq.data import Dictionary

from ..memory import DatastoreMemory
from ..memory.contexts import Contexts
from ..memory.nearest import nearest_neighbors
from ..mixture.interpolation import perplexity
from ..mixture.scoring import TokenScores
from ..mixture.text import TextScorer

NEIGHBORS = 8
CONTEXT = 16
PREDICTIONS = 5
TOKENS_PER_PART = 128


class _Words:
    """Every word once; the rest are numbers."""

    def __init__(self, dictionary: Dictionary):
        self._dictionary = dictionary
        self._numbers: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        return self._numbers.setdefault(int(token), len(self._numbers))

    def all(self) -> list[str]:
        return ["\u23ce" if token == self._dictionary.eos() else self._dictionary[token] for token in self._numbers]


@dataclass
class Inspector:
    """Scores texts and gathers their neighbours and where those stood."""

    scorer: TextScorer
    contexts: list[Contexts]

    @classmethod
    def of(cls, scorer: TextScorer) -> "Inspector":
        return cls(scorer, [Contexts(memory.datastore, scorer.dictionary) for memory in scorer.memories])

    def inspect(self, sequences: list[list[int]], context: int = 0) -> dict[str, Any]:
        """Data for the page; see page.js for the fields of a token. The first ``context`` tokens are not shown."""
        scored = self.scorer.score(sequences).from_token(context)
        words = _Words(self.scorer.dictionary)
        predictions = self._predictions(scored, words)
        neighbors = [
            self._neighbors(number, memory, scored, words) for number, memory in enumerate(self.scorer.memories)
        ]
        knn = _weighted(scored, self.scorer.memories)
        tokens = [
            {
                "w": words(token),
                "lm": _number(lm),
                "knn": _number(p),
                "mix": _number(mix),
                "top": predictions[place],
                "near": sorted((near for store in neighbors for near in store[place]), key=lambda n: -n["share"])[
                    :NEIGHBORS
                ],
            }
            for place, (token, lm, p, mix) in enumerate(
                zip(scored.tokens.tolist(), scored.lm.exp().tolist(), knn, scored.mixture.exp().tolist())
            )
        ]
        return {"about": self._about(scored), "words": words.all(), "tokens": tokens}

    def _about(self, scored: TokenScores) -> dict[str, Any]:
        return {
            "lm": _perplexity(scored.lm),
            "mix": _perplexity(scored.mixture),
            "helped": float((scored.mixture > scored.lm).float().mean()),
            "stores": [
                {
                    "name": memory.name,
                    "entries": len(memory.datastore),
                    "lambda": memory.weight,
                    "temperature": memory.temperature,
                    "k": memory.k or "all",
                    "metric": memory.metric,
                }
                for memory in self.scorer.memories
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

    def _neighbors(self, store: int, memory: DatastoreMemory, scored: TokenScores, words: _Words) -> list[list[dict]]:
        """The nearest entries of one datastore for each token, with their share of its mass."""
        return [
            [
                {
                    "c": [words(token) for token in self.contexts[store].before(neighbor.entry, CONTEXT)],
                    "w": words(neighbor.token),
                    "d": _number(neighbor.distance),
                    "share": _number(neighbor.share),
                    "entry": neighbor.entry,
                    "store": store,
                }
                for neighbor in neighbors
            ]
            for neighbors in nearest_neighbors(memory, scored.queries[store], NEIGHBORS)
        ]


def _weighted(scored: TokenScores, memories: list[DatastoreMemory]) -> list[float]:
    """p of the memories together: the mean by their weights."""
    total = sum(memory.weight for memory in memories)
    if not total:
        return [0.0] * len(scored.tokens)
    parts = [memory.weight / total * p.exp().cpu() for memory, p in zip(memories, scored.memories)]
    return torch.stack(parts).sum(dim=0).tolist()


def _perplexity(log_probs: torch.Tensor) -> float:
    return perplexity(log_probs.double().mean().item())


def _number(value: float) -> float:
    """Four digits are all that anyone reads."""
    return float(f"{value:.4g}")
