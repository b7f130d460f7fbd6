"""Scores the predicted tokens of a batch with the mixture, and how the scorer gets into ``fairseq-eval-lm``."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor, nn

from .blocks import own_positions
from .errors import KnnlmError
from .probs import interpolate
from .retrieval import Retriever

logger = logging.getLogger(__name__)

MAX_LOGITS = 1 << 26  # in memory at once: 256 MiB, whatever --max-tokens says


def is_standard_decoder(model: nn.Module) -> bool:
    """Whether features and output layer can be called apart, so that only what is needed is computed."""
    return isinstance(getattr(model, "decoder", None), TransformerDecoderBase)


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


class KNNSequenceScorer(SequenceScorer):
    """fairseq's scorer, with the mixture in place of the LM's probability. Without retrievers: the LM, faster.

    A sample holds several batches (see EvalBatches): the model runs on each, the search on all of them at once.
    """

    def __init__(self, tgt_dict, softmax_batch: int | None, retrievers: list[Retriever]):
        super().__init__(tgt_dict, softmax_batch)
        self.retrievers = retrievers
        self.seconds = {"model": 0.0, "search": 0.0, "mixing": 0.0}
        self.tokens = 0
        self.lm_sum = 0.0
        self.hits = [0] * len(retrievers)

    @torch.no_grad()
    def generate(self, models: list[nn.Module], sample: dict, **kwargs) -> list:
        (model,) = models
        model.eval()
        clock = _Clock(self.seconds)
        targets, lm, queries = zip(*(self._run_model(model, batch) for batch in sample["batches"]))
        all_targets, all_lm = torch.cat(targets), torch.cat(lm)
        clock.stop("model")
        knn = [
            retriever.target_log_probs(torch.cat([query[number] for query in queries]), all_targets)
            for number, retriever in enumerate(self.retrievers)
        ]
        clock.stop("search")
        scores = interpolate(all_lm, knn, [retriever.weight for retriever in self.retrievers])
        self._count(all_lm, knn)
        clock.stop("mixing")
        return self._hypotheses(sample["batches"], scores)

    def _run_model(self, model: nn.Module, batch: dict) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Targets (n,), their log p_LM (n,), and the queries (n, C) for each retriever, of the predicted positions."""
        features, _ = model(batch["net_input"]["src_tokens"], features_only=True)
        own = own_positions(batch)
        queries = [retriever.extractor.pop()[own] for retriever in self.retrievers]
        targets = batch["target"][own]
        step = min(self.softmax_batch, MAX_LOGITS // len(model.decoder.dictionary))
        lm = [
            lm_target_log_probs(model.decoder, *part) for part in zip(features[own].split(step), targets.split(step))
        ]
        return targets, torch.cat(lm), queries

    def _hypotheses(self, batches: list[dict], scores: Tensor) -> list:
        """fairseq's result: for each row its tokens and their scores."""
        hypotheses = []
        for batch in batches:
            for row, mask in zip(batch["target"], own_positions(batch)):
                tokens = row[mask]
                own_scores, scores = scores[: len(tokens)], scores[len(tokens) :]
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

    def _count(self, lm: Tensor, knn: list[Tensor]) -> None:
        self.tokens += lm.numel()
        self.lm_sum += lm.double().sum().item()
        for number, log_probs in enumerate(knn):
            self.hits[number] += int(log_probs.isfinite().sum())

    def summary(self) -> str:
        """One line: the LM alone, how often the target was retrieved, where the time went."""
        loss = -self.lm_sum / self.tokens / math.log(2)
        parts = [f"base LM loss (base 2) {loss:.4f}, perplexity {2**loss:.2f}"]
        for retriever, hits in zip(self.retrievers, self.hits):
            parts.append(f"hit rate {hits / self.tokens:.4f} in {retriever.name} (lambda {retriever.weight:g})")
        parts.append(", ".join(f"{name} {seconds:.1f}s" for name, seconds in self.seconds.items()))
        return "kNN-LM: " + "; ".join(parts)


class _Clock:
    def __init__(self, seconds: dict[str, float]):
        self._seconds, self._last = seconds, time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] += now - self._last
        self._last = now


# --- into fairseq-eval-lm -------------------------------------------------------------------------------------------


class InstalledScorer:
    """Remembers the scorer that fairseq built, which proves that it did."""

    scorer: SequenceScorer | None = None


def install_scorer(make_scorer: Callable[..., SequenceScorer] | None) -> InstalledScorer | None:
    """Let the running eval_lm build our scorer where its code says SequenceScorer, once; None leaves it alone.

    eval_lm looks the name up in its module, which is ``__main__`` under ``python -m``.
    """
    if make_scorer is None:
        return None
    installed = InstalledScorer()
    modules = [sys.modules[name] for name in ("fairseq_cli.eval_lm", "__main__") if name in sys.modules]
    modules = [module for module in modules if getattr(module, "SequenceScorer", None) is not None]

    def build(*args, **kwargs) -> SequenceScorer:
        for module in modules:
            module.SequenceScorer = SequenceScorer
        installed.scorer = make_scorer(*args, **kwargs)
        return installed.scorer

    for module in modules:
        module.SequenceScorer = build
    return installed


class EvalBatches:
    """The batches of an evaluation, several at a time where the search wants many queries at once."""

    def __init__(self, batches, batches_at_once: int, installed: InstalledScorer | None):
        self._batches, self._group, self._installed = batches, batches_at_once, installed

    def __len__(self) -> int:
        return -(-len(self._batches) // self._group)

    def __iter__(self) -> Iterator[dict]:
        if self._installed is None:
            yield from self._batches
            return
        scorer = self._installed.scorer
        if scorer is None:
            raise KnnlmError(
                "this fairseq builds its scorer in a way that fairseq-knnlm does not know; "
                "install fairseq-fixed 0.12 and run fairseq-eval-lm"
            )
        group: list[dict] = []
        for batch in self._batches:
            group.append(batch)
            if len(group) == self._group:
                yield _merge(group)
                group = []
        if group:
            yield _merge(group)
        if isinstance(scorer, KNNSequenceScorer) and scorer.tokens:
            logger.info(scorer.summary())


def _merge(batches: list[dict]) -> dict:
    """One sample out of several batches, with the fields that eval_lm itself looks at."""
    return {
        "batches": batches,
        "id": torch.cat([batch["id"] for batch in batches]),
        "ntokens": sum(batch["ntokens"] for batch in batches),
        "net_input": batches[0]["net_input"],
    }
