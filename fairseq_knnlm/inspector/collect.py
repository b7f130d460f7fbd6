"""What the page shows of a text, as plain data."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary

from ..probs import neighbor_log_weights, similarities
from ..retrieval import Retriever
from ..text import ScoredText, TextScorer
from .contexts import Contexts

NEIGHBORS = 8
CONTEXT = 16
PREDICTIONS = 5
ROWS_AT_ONCE = 128


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
        return cls(scorer, [Contexts(retriever.datastore, scorer.dictionary) for retriever in scorer.retrievers])

    def inspect(self, sequences: list[list[int]], context: int = 0) -> dict[str, Any]:
        """Data for the page; see page.js for the fields of a token. The first ``context`` tokens are not shown."""
        scored = self.scorer.score(sequences).from_token(context)
        words = _Words(self.scorer.dictionary)
        predictions = self._predictions(scored, words)
        neighbors = [
            self._neighbors(number, retriever, scored, words) for number, retriever in enumerate(self.scorer.retrievers)
        ]
        knn = _weighted(scored, self.scorer.retrievers)
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

    def _about(self, scored: ScoredText) -> dict[str, Any]:
        return {
            "lm": _perplexity(scored.lm),
            "mix": _perplexity(scored.mixture),
            "helped": float((scored.mixture > scored.lm).float().mean()),
            "stores": [
                {
                    "name": retriever.name,
                    "entries": len(retriever.datastore),
                    "lambda": retriever.weight,
                    "temperature": retriever.temperature,
                    "k": retriever.k or "all",
                    "metric": retriever.metric,
                }
                for retriever in self.scorer.retrievers
            ],
        }

    @torch.no_grad()
    def _predictions(self, scored: ScoredText, words: _Words) -> list[list[list[float]]]:
        """The LM's best guesses: for each token [[word, probability], ...]."""
        model, result = self.scorer.model, []
        for features in scored.features.split(ROWS_AT_ONCE):
            output = model.decoder.output_layer(features[None])  # with an adaptive softmax, the features themselves
            best = model.get_normalized_probs((output, None), log_probs=False)[0].topk(PREDICTIONS)
            for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist()):
                result.append([[words(token), _number(p)] for token, p in zip(tokens, probabilities)])
        return result

    def _neighbors(self, store: int, retriever: Retriever, scored: ScoredText, words: _Words) -> list[list[dict]]:
        """The nearest entries of one datastore for each token, with their share of its mass."""
        queries = np.ascontiguousarray(scored.queries[store].float().cpu().numpy())
        if retriever.k is None:
            found = (retriever.engine.visited(query[None]) for query in queries)
        else:
            distances, ids = retriever.engine.search(queries, retriever.k)
            found = ((d[None], i[None]) for d, i in zip(distances, ids))
        return [self._describe(store, retriever, *neighbors, words) for neighbors in found]

    def _describe(
        self, store: int, retriever: Retriever, distances: np.ndarray, ids: np.ndarray, words: _Words
    ) -> list[dict]:
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), retriever.metric)
        shares = neighbor_log_weights(near, 1 / retriever.temperature)[0].exp()
        best = shares.topk(min(NEIGHBORS, len(shares))).indices.tolist()
        rows = []
        for place in best:
            entry = int(ids[0, place])
            if entry < 0:
                continue
            rows.append(
                {
                    "c": [words(token) for token in self.contexts[store].before(entry, CONTEXT)],
                    "w": words(retriever.datastore.values[entry]),
                    "d": _number(float(distances[0, place])),
                    "share": _number(float(shares[place])),
                    "entry": entry,
                    "store": store,
                }
            )
        return rows


def _weighted(scored: ScoredText, retrievers: list[Retriever]) -> list[float]:
    """p of the memories together: the mean by their weights."""
    total = sum(retriever.weight for retriever in retrievers)
    if not total:
        return [0.0] * len(scored.tokens)
    parts = [retriever.weight / total * p.exp().cpu() for retriever, p in zip(retrievers, scored.memories)]
    return torch.stack(parts).sum(dim=0).tolist()


def _perplexity(log_probs: torch.Tensor) -> float:
    return math.exp(-log_probs.double().mean().item())


def _number(value: float) -> float:
    """Four digits are all that anyone reads."""
    return float(f"{value:.4g}")
