"""A sparse posterior over entries, learnt from what they predict (He, Berg-Kirkpatrick & Neubig 2020, for prototypes).

Text is generated so: theta ~ Dirichlet(alpha, ..., alpha) over the entries, an entry i ~ theta, a context near the key
of i (with the density that the temperature says), and the value of i as the next token. The posterior of theta is taken
as Dirichlet(lambda). An entry is responsible for a query of value y by

    r_i = exp(E[log theta_i] - d_i / T) / sum of the same over all entries of value y      (0 for another value)

with E[log theta_i] = digamma(lambda_i), up to what is the same for all entries. After each update

    lambda <- (1 - rho) lambda + rho (alpha + N * mean of r over all queries),     rho = (u + 1)^-0.8

With alpha < 1 the posterior is sparse: entries that explain much get more, and the others nothing but alpha.

Entries compete within a list, where everything near is, so each list is done by itself, all its updates at once.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .list_walk import ListEntries, ListWalk, QueryRows, parts_of_runs, square_distances

RATE = 0.8  # rho = (u + 1)^-RATE


@dataclass(frozen=True)
class PosteriorOptions:
    """How the posterior is learnt."""

    alpha: float
    updates: int
    temperature: float
    window: int | None  # entries within so many positions of a query are of its own text; None: it has none here


def learn_posterior(walk: ListWalk, options: PosteriorOptions, queries: QueryRows | None) -> np.ndarray:
    """lambda of every entry, (entries,) float32; they add up to about the number of entries.

    Args:
        queries: what has to be explained; None: every entry, by others than itself
    """
    result = np.empty(len(walk.datastore), np.float32)
    places = walk.datastore.positions
    scale = 1.0 if queries is None else len(walk.datastore) / queries.count

    def learn(own: ListEntries) -> None:
        positions = own.ids if places is None else np.asarray(places[own.ids])
        rows, keys = (None, own.keys) if queries is None else queries.of(own)
        for first, stop, piece, pieces in parts_of_runs(own.run_ends):
            part, values = slice(first, stop), own.values[first:stop]
            if queries is None or rows is None:
                some, of_some, where = np.arange(first, stop), values, positions[part]
                weights = torch.from_numpy(np.asarray(own.weights[part]))
            else:  # each query is explained by one piece of a run
                known = queries.values(rows)
                some = np.flatnonzero(np.isin(known, values))[piece::pieces]
                of_some, where = known[some], queries.positions(rows[some])
                weights = torch.full((len(some),), scale)
            distances = square_distances(keys[some], own.keys[part])
            allowed = of_some[:, None] == values
            if options.window is not None:
                allowed &= np.abs(where[:, None] - positions[part]) > options.window
            result[own.ids[part]] = posterior(distances, torch.from_numpy(allowed), weights, options).numpy()

    walk.each(learn, "learning")
    return result


def posterior(distances: Tensor, allowed: Tensor, weights: Tensor, options: PosteriorOptions) -> Tensor:
    """lambda after all updates: distances (r, m) of queries and entries -> (m,).

    Args:
        allowed: (r, m) whether an entry can explain a query
        weights: (r,) how much each query counts
    """
    explained = allowed.any(dim=1)  # the others have nobody, so nobody is responsible
    log_kernel = (distances[explained] / -options.temperature).masked_fill_(~allowed[explained], -torch.inf)
    concentration = torch.ones(distances.size(1))
    for update in range(options.updates):
        responsibilities = (log_kernel + torch.digamma(concentration)).softmax(dim=1)
        rho = (update + 1) ** -RATE
        counts = options.alpha + weights[explained] @ responsibilities
        concentration = (1 - rho) * concentration + rho * counts
    return concentration
