"""One function scores tokens: the model runs on batches, each memory on all queries, and the mixture joins them."""

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor

from ..data.context_blocks import own_positions
from ..keys import Model
from ..keys.running import for_each_batch
from ..memory import Memory, MemoryScores
from .interpolation import interpolate

MAX_LOGITS = 1 << 26  # in memory at once, of all threads: 256 MiB, whatever --max-tokens says


@dataclass
class TokenScores:
    """The n predicted tokens of some batches, in order."""

    tokens: Tensor  # (n,)
    lm: Tensor  # (n,) log-probabilities
    memories: list[Tensor]  # (n,) of each memory, -inf where it does not hold the token
    mixture: Tensor  # (n,)
    entropies: list[Tensor | None]  # (n,) of each memory's shares, in nats
    queries: list[Tensor] = field(default_factory=list, repr=False)  # (n, dim) of each memory, if asked for
    features: Tensor | None = field(default=None, repr=False)  # (n, C), what the output layer sees, if asked for
    seconds: dict[str, float] = field(default_factory=dict, repr=False)  # model, search, cache, mixing

    def __len__(self) -> int:
        return len(self.tokens)

    def from_token(self, start: int) -> "TokenScores":
        """Without the first tokens."""
        return TokenScores(
            self.tokens[start:],
            self.lm[start:],
            [memory[start:] for memory in self.memories],
            self.mixture[start:],
            [None if entropy is None else entropy[start:] for entropy in self.entropies],
            [queries[start:] for queries in self.queries],
            None if self.features is None else self.features[start:],
        )


class SavedRun(Protocol):
    """Keeps the parts of the mixture, so that they can be mixed with other weights later."""

    def add(self, lm: Tensor, tokens: Tensor) -> None: ...

    def add_memory(self, number: int, scores: MemoryScores) -> None: ...


@dataclass
class _ModelRun:
    """What one batch gave; of its predicted positions only."""

    tokens: Tensor  # (n,)
    lm: Tensor  # (n,)
    queries: list[Tensor]  # (n, dim) of each memory
    features: Tensor | None  # (n, C)


@torch.no_grad()
def score_tokens(
    model: Model,
    batches: list[dict],
    memories: list[Memory],
    save: SavedRun | None = None,
    skip: int = 0,
    softmax_batch: int | None = None,
    keep_states: bool = False,
    progress: str | None = None,
) -> TokenScores:
    """Score the tokens that the batches predict.

    Args:
        batches: fairseq batches with ``start_indices``, in corpus order
        save: receives what the mixture was made of
        skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)
        softmax_batch: compute logits of at most so many tokens at once
        keep_states: return queries and features, too, which for a large split are more than memory may hold
        progress: the name of a progress bar over the batches
    """
    model.eval()
    clock = _Clock()
    rows = _rows_of_logits(model, softmax_batch)
    runs: list[_ModelRun] = for_each_batch(
        model, lambda batch: _run_model(model, batch, memories, skip, rows, keep_states), batches, progress
    )
    tokens, lm = torch.cat([run.tokens for run in runs]), torch.cat([run.lm for run in runs])
    queries = [torch.cat(parts) for parts in zip(*(run.queries for run in runs))]
    clock.stop("model")
    log_probs, entropies = [], []
    for number, memory in enumerate(memories):
        parts = []
        for part in memory.scores_in_parts(queries[number], tokens, keep=save is not None):
            if save is not None:
                save.add_memory(number, part)
            part.kept = None  # of all parts together it would fill the memory
            parts.append(part)
        log_probs.append(torch.cat([part.log_probs for part in parts]))
        shares = [part.entropy for part in parts if part.entropy is not None]
        entropies.append(torch.cat(shares) if shares else None)
        clock.stop("cache" if memory.facts.is_cache else "search")
    mixture = interpolate(lm, log_probs, [memory.weight for memory in memories])
    if save is not None:
        save.add(lm, tokens)
    clock.stop("mixing")
    scores = TokenScores(tokens, lm, log_probs, mixture, entropies, seconds=clock.seconds)
    if keep_states:
        scores.queries = queries
        scores.features = torch.cat([run.features for run in runs if run.features is not None])
    return scores


@torch.no_grad()
def read_tokens(model: Model, batches: list[dict], memories: list[Memory], skip: int = 0) -> None:
    """Let the model, and the memories that remember what they saw, read batches that are not scored."""
    model.eval()
    for batch in batches:
        run = _run_model(model, batch, memories, skip, None, keep_features=False)
        for memory, queries in zip(memories, run.queries):
            if memory.facts.is_cache:
                memory.target_log_probs(queries, run.tokens)


def _run_model(
    model: Model, batch: dict, memories: list[Memory], skip: int, logits_rows: int | None, keep_features: bool
) -> _ModelRun:
    """One batch through the model. Without ``logits_rows`` the LM's own probabilities are left out."""
    features, _ = model(**batch["net_input"], features_only=True)
    own = own_positions(batch, skip)
    queries = [_captured(memory)[own] for memory in memories]
    targets, features = batch["target"][own], features[own]
    lm = features.new_empty(0)
    if logits_rows is not None:
        parts = zip(features.split(logits_rows), targets.split(logits_rows))
        lm = torch.cat([lm_target_log_probs(model.decoder, *part) for part in parts])
    return _ModelRun(targets, lm, queries, features if keep_features else None)


def _captured(memory: Memory) -> Tensor:
    """The states of the forward pass just done that a memory is asked with, B x T x C."""
    if memory.extractor is None:
        raise ValueError(f"the memory {memory.title} has no extractor, so it cannot be asked about a model's states")
    return memory.extractor.pop()


def _rows_of_logits(model: Model, softmax_batch: int | None) -> int:
    """How many tokens' logits may be in memory at once in each thread that runs the model."""
    most = MAX_LOGITS // (torch.get_num_threads() * len(model.decoder.dictionary))
    return max(1, most if softmax_batch is None else min(most, softmax_batch))


def is_standard_decoder(model: Model) -> bool:
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


class _Clock:
    """Where the time goes."""

    def __init__(self) -> None:
        self.seconds = {"model": 0.0, "search": 0.0, "cache": 0.0, "mixing": 0.0}
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now
