"""Scores the predicted tokens of a batch with the mixture."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor, nn

from .blocks import own_positions
from .cache import ContinuousCache
from .characters import is_character_level
from .keys import KeyExtractor
from .probs import interpolate
from .retrieval import Keep, Retriever
from .save import SaveWriter
from .threads import for_each_batch

logger = logging.getLogger(__name__)

MAX_LOGITS = 1 << 26  # in memory at once: 256 MiB, whatever --max-tokens says


def is_standard_decoder(model: nn.Module) -> bool:
    """Whether features and output layer can be called apart, so that only what is needed is computed."""
    decoder = getattr(model, "decoder", None)
    return isinstance(decoder, TransformerDecoderBase) or getattr(decoder, "separate_output_layer", False)


def lm_target_log_probs(decoder: TransformerDecoderBase, features: Tensor, targets: Tensor) -> Tensor:
    """log p_LM of the targets alone: features (n, C), targets (n,) -> (n,) float32.

    An adaptive softmax needs its head, and of each tail only the rows whose target lies in it.
    """
    if decoder.adaptive_softmax is None:
        return -F.cross_entropy(decoder.output_layer(features).float(), targets, reduction="none")
    softmax = decoder.adaptive_softmax
    logits, band_targets = softmax(features, targets)
    _, band_rows = softmax.adapt_target(targets)
    log_probs = -F.cross_entropy(logits[0].float(), band_targets[0], reduction="none")
    for band, rows in enumerate(band_rows, start=1):
        if rows is not None:
            log_probs[rows] -= F.cross_entropy(logits[band].float(), band_targets[band], reduction="none")
    return log_probs


@dataclass
class Cache:
    """A continuous cache in the mixture."""

    memory: ContinuousCache
    weight: float
    extractor: KeyExtractor
    identity: dict[str, Any]  # what decides its similarities, for --knn-save


class KNNSequenceScorer(SequenceScorer):
    """fairseq's scorer, with the mixture in place of the LM's probability. With no memory: the LM, faster.

    A sample holds several batches (see EvalBatches): the model runs on each, the search on all of them at once.
    """

    def __init__(
        self,
        tgt_dict,
        softmax_batch: int | None,
        retrievers: list[Retriever],
        cache: Cache | None = None,
        save: SaveWriter | None = None,
        skip: int = 0,
    ):
        """
        Args:
            save: keeps what the mixture was made of
            skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)
        """
        super().__init__(tgt_dict, softmax_batch)
        self.of_characters = is_character_level(tgt_dict)
        self.retrievers, self.cache, self.save, self.skip = retrievers, cache, save, skip
        self._memories: list[Retriever | Cache] = [*retrievers, *([cache] if cache else [])]
        self.seconds = {"model": 0.0, "search": 0.0, "cache": 0.0, "mixing": 0.0}
        self.tokens = 0
        self.sums = {"lm": 0.0, "mixture": 0.0, "oracle": 0.0}  # of log-probabilities
        self.hits = [0] * len(self._memories)

    @torch.no_grad()
    def generate(self, models: list[nn.Module], sample: dict, **kwargs) -> list:
        (model,) = models
        model.eval()
        for batch in sample.get("warm_up", []):  # what came before this part of the text, for cache and model to know
            targets, _, queries, _ = self.run_model(model, batch)
            if self.cache:
                self.cache.memory.target_log_probs(queries[-1], targets)
        clock = _Clock(self.seconds)
        batches = sample["batches"]
        progress = "model" if self.retrievers else None  # there, many batches are one step of fairseq's own bar

        def run(batch: dict) -> tuple[Tensor, Tensor, list[Tensor]]:
            return self.run_model(model, batch)[:3]  # the features of all batches would fill the memory

        targets, lm, queries = zip(*for_each_batch(model, run, batches, progress))
        targets, lm, queries = torch.cat(targets), torch.cat(lm), [torch.cat(parts) for parts in zip(*queries)]
        clock.stop("model")
        others = []
        for number, retriever in enumerate(self.retrievers):
            others.append(retriever.target_log_probs(queries[number], targets, self._keep(f"knn{number}")))
        clock.stop("search")
        if self.cache:
            others.append(self.cache.memory.target_log_probs(queries[-1], targets, self._keep("cache")))
            clock.stop("cache")
        scores = interpolate(lm, others, [memory.weight for memory in self._memories])
        self._count(lm, others, scores)
        if self.save:
            self.save.add(lm, targets)
        clock.stop("mixing")
        return self._hypotheses(batches, scores)

    def _keep(self, memory: str) -> Keep | None:
        if self.save is None:
            return None

        def keep(near: Tensor, matches: Tensor | None) -> None:
            if matches is None:
                self.save.add_log_probs(memory, near)
            else:
                self.save.add_neighbors(memory, near, matches)

        return keep

    def run_model(self, model: nn.Module, batch: dict) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """Of the predicted positions: targets (n,), their log p_LM (n,), queries (n, C) for each memory, features."""
        features, _ = model(**batch["net_input"], features_only=True)
        own = own_positions(batch, self.skip)
        queries = [memory.extractor.pop()[own] for memory in self._memories]
        targets, features = batch["target"][own], features[own]
        step = min(self.softmax_batch, MAX_LOGITS // len(model.decoder.dictionary))
        lm = [lm_target_log_probs(model.decoder, *part) for part in zip(features.split(step), targets.split(step))]
        return targets, torch.cat(lm), queries, features

    def _hypotheses(self, batches: list[dict], scores: Tensor) -> list:
        """fairseq's result: for each row its tokens and their scores."""
        hypotheses = []
        for batch in batches:
            for row, mask in zip(batch["target"], own_positions(batch)):
                tokens = row[mask]
                count = len(tokens) - self.skip
                own_scores, scores = scores[:count], scores[count:]
                own_scores = F.pad(own_scores, (self.skip, 0))  # fairseq takes these off again
                hypotheses.append(
                    [
                        {
                            "tokens": tokens,
                            "score": own_scores.mean(),
                            "attention": None,
                            "alignment": None,
                            "positional_scores": own_scores,
                        }
                    ]
                )
        return hypotheses

    def _count(self, lm: Tensor, others: list[Tensor], mixture: Tensor) -> None:
        self.tokens += lm.numel()
        best = torch.stack([lm, *(log_probs.to(lm) for log_probs in others)]).max(dim=0).values
        for name, log_probs in (("lm", lm), ("mixture", mixture), ("oracle", best)):
            self.sums[name] += log_probs.double().sum().item()
        for number, log_probs in enumerate(others):
            self.hits[number] += int(log_probs.isfinite().sum())

    def perplexity(self, name: str) -> float:
        """Of the LM, the mixture, or the oracle (per token the best of LM and memories)."""
        return math.exp(-self.sums[name] / self.tokens)

    def summary(self) -> str:
        """One line: the LM alone, the oracle, how often the target was retrieved, where the time went."""
        loss = -self.sums["lm"] / self.tokens / math.log(2)
        parts = [f"base LM loss (base 2) {loss:.4f}, perplexity {2**loss:.2f}"]
        if self._memories:
            parts.append(f"mixture perplexity {self.perplexity('mixture'):.2f}")
            parts.append(f"oracle perplexity {self.perplexity('oracle'):.2f}")
        for retriever, hits in zip(self.retrievers, self.hits):
            part = f"hit rate {hits / self.tokens:.4f} in {retriever.name} (lambda {retriever.weight:g})"
            if retriever.k is not None:
                part += f", {math.exp(retriever.entropy_sum / self.tokens):.1f} effective neighbours"
            parts.append(part)
        if self.cache:
            parts.append(f"hit rate {self.hits[-1] / self.tokens:.4f} in the cache (lambda {self.cache.weight:g})")
        parts.append(", ".join(f"{name} {time:.1f}s" for name, time in self.seconds.items() if time or name != "cache"))
        return "kNN-LM: " + "; ".join(parts)

    def finish(self) -> None:
        """After the last batch."""
        if self.tokens:
            logger.info(self.summary())
            if self.of_characters:
                bits = math.log2(self.perplexity("mixture"))
                logger.info(f"bits per character: {bits:.4f} (a token is a character, so it is the loss in base 2)")
        if self.save:
            self.save.finish(self.perplexity("mixture") if self.tokens else math.nan)
            logger.info(f"saved to {self.save.folder}: try knnlm tune and knnlm sweep on it")


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self._seconds, self._last = seconds, time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] += now - self._last
        self._last = now
