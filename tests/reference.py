"""kNN-LM in a few lines of NumPy: the definition that the package is checked against."""

import numpy as np

# How far log-probabilities of one LM may lie apart: matrix products by another library (products.py) end otherwise.
# fairseq prints six decimals of a score, and four of the loss.
SAME_SCORES = 5e-6
ROWS = 256  # queries at once, so that their similarities to every key fit into memory


def similarities(queries, keys, metric="l2"):
    """Inner products, or negative squared distances, of queries (n, dim) and keys (m, dim) -> (n, m) float64."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    products = queries @ keys.T
    if metric == "ip":
        return products
    return 2 * products - (keys**2).sum(axis=1) - (queries**2).sum(axis=1, keepdims=True)


def knn_distribution(queries, keys, values, k, temperature=1.0, metric="l2", vocabulary=None, entry_weights=None):
    """p_kNN of every token for each query, by brute force in float64: (n, vocabulary)."""
    vocabulary = int(values.max()) + 1 if vocabulary is None else vocabulary
    result = np.zeros((len(queries), vocabulary))
    for start in range(0, len(queries), ROWS):
        scores = similarities(queries[start : start + ROWS], keys, metric)
        everything = np.broadcast_to(np.arange(len(keys)), scores.shape)
        nearest = np.argsort(-scores, axis=1, kind="stable")[:, :k] if k < len(keys) else everything
        scores = np.take_along_axis(scores, nearest, axis=1)
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / temperature)
        if entry_weights is not None:
            weights = weights * entry_weights[nearest]
        shares = weights / weights.sum(axis=1, keepdims=True)
        for row in range(len(shares)):
            result[start + row] = np.bincount(values[nearest[row]], shares[row], minlength=vocabulary)
    return result


def knn_probability(queries, targets, keys, values, k, temperature=1.0, metric="l2", entry_weights=None):
    """p_kNN of each target, by brute force in float64."""
    vocabulary = int(max(values.max(), targets.max())) + 1
    everything = knn_distribution(queries, keys, values, k, temperature, metric, vocabulary, entry_weights)
    return everything[np.arange(len(targets)), targets]


def has_tie(queries, keys, k, metric="l2", gap=1e-4):
    """Whether the k-th and the next neighbour are so close that rounding decides between them."""
    if k >= len(keys):
        return np.zeros(len(queries), bool)
    parts = []
    for start in range(0, len(queries), ROWS):
        scores = np.partition(similarities(queries[start : start + ROWS], keys, metric), [-k - 1, -k], axis=1)
        parts.append(scores[:, -k] - scores[:, -k - 1] < gap)
    return np.concatenate(parts)


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
