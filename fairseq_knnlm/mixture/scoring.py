"""One function scores tokens: the model runs on batches, each memory on all queries, and the mixture joins them."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor

from ..data.context_blocks import own_positions
from ..data.lane_reading import corpus_order, in_lanes
from ..keys import Model, members_of
from ..keys.running import for_each_batch
from ..memory import Memory, MemoryScores
from ..memory.features import Features
from ..progress import progress
from .ahead_of_model import SearchesAhead, parts_of
from .gate import Gate
from .interpolation import interpolate, interpolate_by_token, log_mean
from .lm_features import certainty, with_last_token
from .model_runs import ModelRun, in_order
from .output_layer import top_tokens

LONG_SEARCH = 8192  # tokens, from which on a search shows its progress
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
    weights: Tensor | None = field(default=None, repr=False)  # (n, memories) lambdas of each token, with a gate

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
            weights=None if self.weights is None else self.weights[start:],
        )


class SavedRun(Protocol):
    """Keeps the parts of the mixture, so that they can be mixed with other weights later."""

    @property
    def top(self) -> int: ...  # how many of the LM's most probable tokens it wants of each token

    def add_top(self, tokens: Tensor, probs: Tensor) -> None: ...

    def add(self, lm: Tensor, tokens: Tensor, features: Tensor | None = None) -> None: ...

    def add_memory(self, number: int, scores: MemoryScores) -> None: ...


@torch.no_grad()
def score_tokens(
    model: Model,
    batches: list[dict],
    memories: list[Memory],
    save: SavedRun | None = None,
    skip: int = 0,
    softmax_batch: int | None = None,
    keep_states: bool = False,
    done: Callable[[int], None] | None = None,
    gate: Gate | None = None,
) -> TokenScores:
    """Score the tokens that the batches predict.

    Args:
        batches: fairseq batches with ``start_indices``, in corpus order
        save: receives what the mixture was made of
        skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)
        softmax_batch: compute logits of at most so many tokens at once
        keep_states: return queries and features, too, which for a large split are more than memory may hold
        done: told how many tokens the model has been through, from any thread; a long search then shows its progress
        gate: weights of each token, in place of the memories' own
    """
    model.eval()
    clock = _Clock()
    rows = _rows_of_logits(model, softmax_batch)

    def run(batch: dict) -> ModelRun:
        keep_top, look = save.top if save is not None else 0, save is not None or gate is not None
        result = _run_model(model, batch, memories, skip, rows, keep_states, look, keep_top)
        if done is not None:
            done(len(result.tokens))
        return result

    found: list[list[MemoryScores]] = [[] for _ in memories]

    def receive(number: int, part: MemoryScores) -> None:
        if save is not None:
            save.add_memory(number, part)
        part.kept = None  # of all parts together it would fill the memory
        found[number].append(part)

    runs: list[ModelRun] = []
    with SearchesAhead(memories, save is not None, receive) as elsewhere:
        lanes = in_lanes(batches)
        for some in parts_of(batches, 0 if lanes else elsewhere.part_queries, skip):
            new: list[ModelRun] = for_each_batch(model, run, some)
            new = [in_order(new, corpus_order(some, skip))] if lanes else new
            elsewhere.begin([run.queries for run in new], [run.tokens for run in new])
            runs += new
        clock.stop("model")
        elsewhere.finish()
        clock.stop("search")
    tokens, lm = torch.cat([run.tokens for run in runs]), torch.cat([run.lm for run in runs])
    queries = [torch.cat(parts) for parts in zip(*(run.queries for run in runs))]
    for number, memory in enumerate(memories):
        if number in elsewhere.memories:
            continue
        long = done is not None and memory.preferred_queries and len(tokens) >= LONG_SEARCH
        with progress("retrieving", len(tokens), " tokens") if long else nullcontext() as bar:
            for part in memory.scores_in_parts(queries[number], tokens, keep=save is not None):
                receive(number, part)
                if bar is not None:
                    bar.update(len(part.log_probs))
        clock.stop("cache" if memory.facts.is_cache else "search")
    log_probs = [torch.cat([part.log_probs for part in parts]) for parts in found]
    shares = [[part.entropy for part in parts if part.entropy is not None] for parts in found]
    entropies = [torch.cat(own) if own else None for own in shares]
    lm_features, weights = torch.cat([run.lm_features for run in runs]), None
    if gate is None:
        mixture = interpolate(lm, log_probs, [memory.weight for memory in memories])
    else:
        log_weights = gate.log_weights(lm_features, [_joined(parts) for parts in found])
        mixture, weights = interpolate_by_token(lm, log_probs, log_weights), log_weights[:, 1:].exp()
    if save is not None:
        save.add(lm, tokens, lm_features)
        for batch_run in runs:
            if batch_run.top is not None:
                save.add_top(*batch_run.top)
    clock.stop("mixing")
    scores = TokenScores(tokens, lm, log_probs, mixture, entropies, seconds=clock.seconds, weights=weights)
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


def _joined(parts: list[MemoryScores]) -> Features:
    """The features of consecutive tokens, (n,) each."""
    names = (parts[0].features or {}) if parts else {}
    return {name: torch.cat([part.features[name] for part in parts if part.features]) for name in names}


def _run_model(
    model: Model,
    batch: dict,
    memories: list[Memory],
    skip: int,
    logits_rows: int | None,
    keep_features: bool,
    look: bool = False,
    keep_top: int = 0,
) -> ModelRun:
    """One batch through the model. Without ``logits_rows`` the LM's own probabilities are left out.

    Args:
        look: also return what a gate may look at of the LM; of several LMs, the mean
        keep_top: return so many of the LM's most probable tokens
    """
    own = own_positions(batch, skip)
    targets = batch["target"][own]
    members = members_of(model)
    states = [member(**batch["net_input"], features_only=True)[0][own] for member in members]  # (n, C) of each
    queries = [_captured(memory)[own] for memory in memories]
    lm = lm_features = states[0].new_empty(0)
    if logits_rows is not None and len(targets):  # of lanes that only warm up there are none
        parts = zip(targets.split(logits_rows), *(features.split(logits_rows) for features in states))
        scores = [_scores_of_part(members, look, *part) for part in parts]
        lm = torch.cat([log_probs for log_probs, _ in scores])
        if look:
            certainties = torch.cat([each for _, each in scores if each is not None])
            lm_features = with_last_token(certainties, batch["net_input"]["src_tokens"][own])
    top = None
    if keep_top and len(targets):
        top = top_tokens([member.decoder for member in members], states, keep_top, logits_rows)
    return ModelRun(targets, lm, queries, states[0] if keep_features else None, lm_features, top)


def _scores_of_part(
    members: list[Model], look: bool, targets: Tensor, *states: Tensor
) -> tuple[Tensor, Tensor | None]:
    """log p_LM of some targets (n,), and how certain the LM is: of the only model, or of the mean of several.

    states: (n, C) of each.
    """
    scores = [lm_scores(member.decoder, own, targets, look) for member, own in zip(members, states)]
    certainties = [each for _, each in scores if each is not None]
    return log_mean([log_probs for log_probs, _ in scores]), torch.stack(certainties).mean(dim=0) if look else None


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
    decoders = [getattr(member, "decoder", None) for member in members_of(model)]
    return all(
        isinstance(decoder, TransformerDecoderBase) or getattr(decoder, "separate_output_layer", False)
        for decoder in decoders
    )


def lm_target_log_probs(decoder: TransformerDecoderBase, features: Tensor, targets: Tensor) -> Tensor:
    """log p_LM of the targets alone: features (n, C), targets (n,) -> (n,) float32.

    An adaptive softmax needs its head, and of each tail only the rows whose target lies in it.
    """
    return lm_scores(decoder, features, targets, look=False)[0]


def lm_scores(
    decoder: TransformerDecoderBase, features: Tensor, targets: Tensor, look: bool
) -> tuple[Tensor, Tensor | None]:
    """log p_LM of the targets (n,), and what a gate may look at of the logits that were computed for it (n, 2)."""
    if decoder.adaptive_softmax is None:
        all_logits = decoder.output_layer(features).float()
        log_probs = -F.cross_entropy(all_logits, targets, reduction="none")
        return log_probs, certainty(all_logits) if look else None
    softmax = decoder.adaptive_softmax
    logits, band_targets = softmax(features, targets)
    _, band_rows = softmax.adapt_target(targets)
    log_probs = -F.cross_entropy(logits[0].float(), band_targets[0], reduction="none")
    for band, rows in enumerate(band_rows, start=1):
        if rows is not None:
            log_probs[rows] -= F.cross_entropy(logits[band].float(), band_targets[band], reduction="none")
    return log_probs, certainty(logits[0]) if look else None


class _Clock:
    """Where the time goes."""

    def __init__(self) -> None:
        self.seconds = {"model": 0.0, "search": 0.0, "cache": 0.0, "mixing": 0.0}
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now
