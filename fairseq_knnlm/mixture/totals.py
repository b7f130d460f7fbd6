"""The result of a run: sums over its tokens, and the line that sums them up."""

import math

import torch

from ..memory import Memory
from .interpolation import perplexity
from .scoring import TokenScores

ROUNDING = 1e-5  # by which a mixture that is all LM may differ from it


class Totals:
    """Adds up the scores of a run, in double precision."""

    def __init__(self, memories: list[Memory]):
        self._memories = memories
        self.tokens = 0
        self.sums = {"lm": 0.0, "mixture": 0.0, "oracle": 0.0}  # of log-probabilities
        self.hits = [0] * len(memories)
        self.entropies: list[float | None] = [None] * len(memories)  # None: no shares were computed
        self.seconds: dict[str, float] = {}
        self.weights: list[float] | None = None  # sums of the lambdas, with a gate

    def add(self, scores: TokenScores) -> None:
        self.tokens += len(scores)
        best = torch.stack([scores.lm, *(log_probs.to(scores.lm) for log_probs in scores.memories)]).max(dim=0).values
        for name, log_probs in (("lm", scores.lm), ("mixture", scores.mixture), ("oracle", best)):
            self.sums[name] += log_probs.double().sum().item()
        for number, (log_probs, entropy) in enumerate(zip(scores.memories, scores.entropies)):
            self.hits[number] += int(log_probs.isfinite().sum())
            if entropy is not None:
                self.entropies[number] = (self.entropies[number] or 0.0) + entropy.double().sum().item()
        if scores.weights is not None:
            sums = scores.weights.double().sum(dim=0).tolist()
            self.weights = [a + b for a, b in zip(self.weights or [0.0] * len(sums), sums)]
        for name, seconds in scores.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def perplexity(self, name: str) -> float:
        """Of the LM, the mixture, or the oracle (per token the best of LM and memories)."""
        return perplexity(self.sums[name] / self.tokens)

    def bits(self, name: str) -> float:
        """The loss in base 2."""
        return -self.sums[name] / self.tokens / math.log(2)

    def lambda_of(self, number: int) -> str:
        """The weight of a memory: its own, or with a gate the mean of all tokens."""
        if self.weights is None:
            return f"lambda {self._memories[number].weight:g}"
        return f"lambda {self.weights[number] / self.tokens:.3g} on average"

    def summary(self) -> str:
        """One line: the LM alone, the oracle, how often the target was retrieved, where the time went."""
        parts = [f"base LM loss (base 2) {self.bits('lm'):.4f}, perplexity {self.perplexity('lm'):.2f}"]
        if self._memories:
            parts.append(f"mixture perplexity {self.perplexity('mixture'):.2f}")
            parts.append(f"oracle perplexity {self.perplexity('oracle'):.2f}")
        for number, (memory, hits, entropy) in enumerate(zip(self._memories, self.hits, self.entropies)):
            part = f"hit rate {hits / self.tokens:.4f} {memory.title} ({self.lambda_of(number)})"
            if entropy is not None:
                part += f", {math.exp(entropy / self.tokens):.1f} effective neighbours"
            parts.append(part)
        times = (f"{name} {time:.1f}s" for name, time in self.seconds.items() if time or name != "cache")
        return "kNN-LM: " + "; ".join([*parts, ", ".join(times)])

    def hint(self, save: str | None = None) -> str:
        """What to do if the mixture is worse than the LM alone; empty if it is not.

        Args:
            save: where this very run was saved
        """
        return worse_than_lm(self.perplexity("lm"), self.perplexity("mixture"), save)


def worse_than_lm(lm: float, mixture: float, save: str | None = None) -> str:
    """A sentence for somebody whose mixture has a higher perplexity than the LM; empty if it has not."""
    if mixture <= lm * (1 + ROUNDING):
        return ""
    first = "" if save else "score valid with --knn-save SAVE, then "
    return (
        f"hint: the mixture's perplexity of {mixture:.2f} is worse than the {lm:.2f} of the LM alone; to find a lambda "
        f"and a temperature that help, {first}run knnlm tune {save or 'SAVE'} --keep"
    )
