"""kNN-LM in a few lines of NumPy: the definition that the package is checked against."""

import numpy as np


def knn_probability(queries, targets, keys, values, k, temperature=1.0, metric="l2"):
    """p_kNN of each target, by brute force in float64."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    result = []
    for query, target in zip(queries, targets):
        score = keys @ query if metric == "ip" else -((keys - query) ** 2).sum(axis=1)
        nearest = np.argsort(-score, kind="stable")[:k]
        weights = np.exp((score[nearest] - score[nearest].max()) / temperature)
        result.append(weights[values[nearest] == target].sum() / weights.sum())
    return np.array(result)


def has_tie(queries, keys, k, metric="l2", gap=1e-4):
    """Whether the k-th and the next neighbour are so close that rounding decides between them."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    if k >= len(keys):
        return np.zeros(len(queries), bool)
    scores = queries @ keys.T
    if metric == "l2":
        scores = 2 * scores - (keys**2).sum(axis=1) - (queries**2).sum(axis=1, keepdims=True)
    scores.sort(axis=1)
    return scores[:, -k] - scores[:, -k - 1] < gap


def mixture(lm_log_probs, knn_probabilities, weights):
    """log p of the mixture."""
    p = (1 - sum(weights)) * np.exp(lm_log_probs)
    for probability, weight in zip(knn_probabilities, weights):
        p = p + weight * probability
    return np.log(p)


def load(datastore):
    """All keys and values of a datastore, in memory."""
    return np.concatenate(list(datastore.key_blocks())), datastore.values


def cache_probability(states, tokens, size, theta, starts=None):
    """p_cache of each token, one at a time in float64; starts[t] is the first position that token t may look at."""
    states = states.astype(np.float64)
    result = np.zeros(len(tokens))
    for t in range(1, len(tokens)):
        past = slice(max(0, t - size, 0 if starts is None else starts[t]), t)
        if past.start == past.stop:
            continue
        score = theta * states[past] @ states[t]
        weights = np.exp(score - score.max())
        result[t] = weights[tokens[past] == tokens[t]].sum() / weights.sum()
    return result
