"""q(t|x) = softmax over t of e_t^T W e_x: which prototype a sentence is an edit of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLE = 256  # sentences that tell the scale of W
SPREAD = 64  # prototypes over which the mass of q is spread at the start, as the exponential of its entropy


class Retriever(nn.Module):
    """Embeddings are frozen, only W is learnt; it begins as a multiple of the identity.

    The embeddings have no mean, so a sentence gets a constant as one more coordinate, whose column of W is ``bias``.
    Without it nothing could say that a prototype suits every sentence, which is what a sparse prior asks for.
    W = scale * (identity + gain * weight): an optimizer like Adam moves every number by about the learning rate, which
    is nothing beside a large multiple; gain says how much faster W shall learn than the networks.
    """

    scale: Tensor

    def __init__(self, dim: int, gain: float = 1.0):
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.zeros(dim, dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, sentences: Tensor, prototypes: Tensor, own: Tensor | None = None) -> Tensor:
        """log q(t|x): (B, d), (K, d) -> (B, K).

        Args:
            own: (B,) the prototype that is the sentence itself, which it must not retrieve; -1: none is. It is left out
                of that row only: other sentences of the batch may well be edits of it.
        """
        queries = self.scale * (sentences + self.gain * F.linear(sentences, self.weight, self.bias))
        return masked_log_softmax(queries @ prototypes.T, own)

    @torch.no_grad()
    def rescale(self, embeddings: Tensor, spread: float = SPREAD) -> None:
        """Choose the multiple so that q is spread over about so many prototypes.

        Cosines of one encoder lie between 0.9 and 1, of another between 0 and 0.5: no constant fits both.
        """
        count = len(embeddings)
        rows = torch.linspace(0, count - 1, min(SAMPLE, count)).long()
        scores = embeddings[rows] @ embeddings.T
        wanted = min(spread, max(count - 1, 1) / 2)
        low, high = 1e-3, 1e4
        for _ in range(40):
            scale = (low * high) ** 0.5
            log_q = masked_log_softmax(scale * scores, rows.to(scores.device))
            entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(dim=1).mean()
            low, high = (scale, high) if entropy.exp() > wanted else (low, scale)
        self.scale.fill_(scale)


def masked_log_softmax(scores: Tensor, own: Tensor | None) -> Tensor:
    """log softmax of the rows (B, K), each without the column ``own`` (B,) of its own; -1: with all of them."""
    if own is not None and bool((own >= 0).any()):
        rows = torch.nonzero(own >= 0)[:, 0]
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[rows, own[rows]] = True
        scores = scores.masked_fill(mask, -torch.inf)
    return scores.log_softmax(dim=1)


def retrieval_kl(log_q: Tensor, log_prior: Tensor) -> Tensor:
    """KL of q(t|x) against E_q[log theta], whose exponentials need not sum to one: (B, K), (K,) -> (B,)."""
    probs = log_q.exp()
    return (probs * (log_q.masked_fill(log_q == -torch.inf, 0.0) - log_prior)).sum(dim=1)


def reinforce_loss(log_q: Tensor, rewards: Tensor) -> Tensor:
    """A number per sentence whose gradient by W is that of -E_q[reward], without bias.

    Args:
        log_q: (B, n) log q of the n samples
        rewards: (B, n) log p(x|t, z) of each; the baseline of a sample is the mean of the others
    """
    rewards = rewards.detach()
    count = rewards.size(1)
    if count == 1:  # nothing to compare with
        return -(rewards * log_q)[:, 0]
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (count - 1)
    return -((rewards - others) * log_q).mean(dim=1)
