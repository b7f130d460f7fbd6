"""The result of a run: sums over its tokens, and the line that sums them up."""

import math

import torch

from ..memory import Memory
from .interpolation import perplexity
from .scoring import TokenScores


class Totals:
    """Adds up the scores of a run, in double precision."""

    def __init__(self, memories: list[Memory]):
        self._memories = memories
        self.tokens = 0
        self.sums = {"lm": 0.0, "mixture": 0.0, "oracle": 0.0}  # of log-probabilities
        self.hits = [0] * len(memories)
        self.entropies: list[float | None] = [None] * len(memories)  # None: no shares were computed
        self.seconds: dict[str, float] = {}

    def add(self, scores: TokenScores) -> None:
        self.tokens += len(scores)
        best = torch.stack([scores.lm, *(log_probs.to(scores.lm) for log_probs in scores.memories)]).max(dim=0).values
        for name, log_probs in (("lm", scores.lm), ("mixture", scores.mixture), ("oracle", best)):
            self.sums[name] += log_probs.double().sum().item()
        for number, (log_probs, entropy) in enumerate(zip(scores.memories, scores.entropies)):
            self.hits[number] += int(log_probs.isfinite().sum())
            if entropy is not None:
                self.entropies[number] = (self.entropies[number] or 0.0) + entropy.double().sum().item()
        for name, seconds in scores.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def perplexity(self, name: str) -> float:
        """Of the LM, the mixture, or the oracle (per token the best of LM and memories)."""
        return perplexity(self.sums[name] / self.tokens)

    def bits(self, name: str) -> float:
        """The loss in base 2."""
        return -self.sums[name] / self.tokens / math.log(2)

    def summary(self) -> str:
        """One line: the LM alone, the oracle, how often the target was retrieved, where the time went."""
        parts = [f"base LM loss (base 2) {self.bits('lm'):.4f}, perplexity {self.perplexity('lm'):.2f}"]
        if self._memories:
            parts.append(f"mixture perplexity {self.perplexity('mixture'):.2f}")
            parts.append(f"oracle perplexity {self.perplexity('oracle'):.2f}")
        for memory, hits, entropy in zip(self._memories, self.hits, self.entropies):
            part = f"hit rate {hits / self.tokens:.4f} {memory.title} (lambda {memory.weight:g})"
            if entropy is not None:
                part += f", {math.exp(entropy / self.tokens):.1f} effective neighbours"
            parts.append(part)
        times = (f"{name} {time:.1f}s" for name, time in self.seconds.items() if time or name != "cache")
        return "kNN-LM: " + "; ".join([*parts, ", ".join(times)])
