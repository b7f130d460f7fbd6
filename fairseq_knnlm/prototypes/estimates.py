"""How probable sentences are under the neural editor, by importance weighting.

    log p(x) = log sum_t p(t) E_p(z) [p(x|t, z)],    E_p(z) [p(x|t, z)] = E_r(z) [p(x|t, z) p(z) / r(z)]

The sum goes over the prototypes that the retriever ranks first, or over all of them; the inner expectation is the mean
over some edit vectors, most of them from q(z|t, x) and some from p(z) (``EditVectors.weighted``). What the other
prototypes add is estimated from a few of them, drawn from p(t): leaving them out would count as nothing what is most of
the mass of a dense prior. Either way the estimate is a lower bound in the mean.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.sentences import Sentences
from ..progress import progress
from .prototype_set import PrototypeSet

ROWS = 768  # pairs of a sentence with a prototype and an edit vector that are scored at once


@dataclass
class Estimate:
    """Of n sentences."""

    log_probs: np.ndarray  # (n,) natural logarithms
    top_log_probs: np.ndarray  # (n,) of the sum over the first prototypes alone
    tokens: int  # ends included
    seconds: float
    retrieval_seconds: float  # of them, to rank the prototypes

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.log_probs.sum()) / self.tokens)

    @property
    def top_perplexity(self) -> float:
        return math.exp(-float(self.top_log_probs.sum()) / self.tokens)

    @property
    def sentences_per_second(self) -> float:
        return len(self.log_probs) / max(self.seconds, 1e-9)


def _batches(sentences: Sentences, size: int) -> Iterator[np.ndarray]:
    """Numbers of sentences of about one length."""
    order = np.argsort(sentences.lengths, kind="stable")
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _padded(rows: Sentences) -> Tensor:
    return torch.from_numpy(rows.tokens.astype(np.int64))


@torch.no_grad()
def retrieve(model: Any, prototypes: PrototypeSet, embeddings: np.ndarray, own: np.ndarray | None = None) -> Tensor:
    """log q(t|x) over these prototypes, of their own positions in the set: (n, d) -> (n, k)."""
    device = next(model.parameters()).device
    queries = torch.from_numpy(embeddings).to(device)
    masked = None if own is None else torch.from_numpy(own).to(device)
    return model.retriever(queries, prototypes.embeddings.to(device), masked)


@torch.no_grad()
def pair_log_probs(model: Any, pairs: tuple[Tensor, Tensor], samples: int) -> Tensor:
    """log p(x|t) of pairs of prototypes and sentences, (m, S) and (m, T) tokens: the mean over ``samples`` z, (m,)."""
    prototypes, sentences = pairs
    edits, log_weights = model.edits.weighted(model.edit_encoder(prototypes, sentences), samples)
    read = model.editor.read(prototypes).repeat(samples)
    scores = model.editor.log_likelihood(sentences.repeat_interleave(samples, dim=0), read, edits, model.eos)
    weighted = (scores + log_weights).double().view(-1, samples)
    return torch.logsumexp(weighted, dim=1) - math.log(samples)


@torch.no_grad()
def sentence_log_probs(
    model: Any, prototypes: PrototypeSet, sentences: Sentences, embeddings: np.ndarray, top: int | None, samples: int,
    rest: int = 0, name: str = "scoring",
) -> Estimate:  # fmt: skip
    """
    Args:
        embeddings: (n, d) of the sentences, prepared as the prototypes' are
        top: prototypes of each sentence, the first by q(t|x); None: the sum over all of them
        samples: edit vectors for each prototype
        rest: how many of the other prototypes are drawn; 0: they count as nothing
    """
    model.eval()
    device = next(model.parameters()).device
    count = len(prototypes) if top is None else min(top, len(prototypes))
    rest = rest if count < len(prototypes) else 0
    result, result_of_top = np.empty(len(sentences)), np.empty(len(sentences))
    started, ranking = time.perf_counter(), 0.0
    with progress(name, len(sentences), " sentences") as bar:
        for numbers in _batches(sentences, max(1, ROWS // (count + rest))):
            began = time.perf_counter()
            if count == len(prototypes):
                chosen = torch.arange(count).expand(len(numbers), -1)
            else:
                chosen = retrieve(model, prototypes, embeddings[numbers]).topk(count, dim=1).indices.cpu()
            ranking += time.perf_counter() - began
            log_weights = prototypes.log_prior[chosen]  # (B, count)
            if rest:
                chosen, log_weights = _with_others(prototypes.log_prior, chosen, log_weights, rest)
            rows = _padded(sentences.rows(numbers))
            flat, place = chosen.flatten(), torch.arange(len(numbers)).repeat_interleave(chosen.size(1))
            scores = torch.empty(len(flat), dtype=torch.float64)
            step = max(1, ROWS // samples)
            for start in range(0, len(flat), step):
                own = slice(start, start + step)
                pairs = _padded(prototypes.sentences.rows(flat[own].numpy())), rows[place[own]]
                scores[own] = pair_log_probs(model, (pairs[0].to(device), pairs[1].to(device)), samples).cpu()
            joint = scores.view(chosen.shape) + log_weights
            result[numbers] = torch.logsumexp(joint, dim=1).numpy()
            result_of_top[numbers] = torch.logsumexp(joint[:, :count], dim=1).numpy()
            bar.update(len(numbers))
    return Estimate(result, result_of_top, int(sentences.lengths.sum()), time.perf_counter() - started, ranking)


def _with_others(log_prior: Tensor, chosen: Tensor, log_weights: Tensor, rest: int) -> tuple[Tensor, Tensor]:
    """The chosen prototypes and ``rest`` others, drawn from p(t), each of which stands for its share of all others.

    Args:
        log_prior: (k,); chosen, log_weights: (B, count) -> both (B, count + rest)
    """
    others = log_prior.exp().expand(len(chosen), -1).scatter(1, chosen, 0.0)
    drawn = torch.multinomial(others.clamp(min=1e-300), rest, replacement=True)
    mass = others.sum(dim=1, keepdim=True).clamp(min=1e-300).log() - math.log(rest)
    return torch.cat([chosen, drawn], dim=1), torch.cat([log_weights, mass.expand(-1, rest)], dim=1)


@torch.no_grad()
def language_model_log_probs(model: Any, sentences: Sentences) -> Estimate:
    """Of the decoder without prototypes, exactly."""
    model.eval()
    device = next(model.parameters()).device
    result, started = np.empty(len(sentences)), time.perf_counter()
    for numbers in _batches(sentences, ROWS):
        rows = _padded(sentences.rows(numbers)).to(device)
        result[numbers] = model.editor.log_likelihood(rows, None, None, model.eos).double().cpu().numpy()
    return Estimate(result, result, int(sentences.lengths.sum()), time.perf_counter() - started, 0.0)
