"""From the flags to retrievers: a datastore, its search engine, and what p_kNN needs to know."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .datastore import Datastore
from .errors import KnnlmError
from .index import build_index_if_missing, extract_ivf, open_index
from .keys import KeyExtractor, key_dimension, resolve_layer, weights_fingerprint
from .probs import entropy, neighbor_log_weights, similarities, target_log_probs, vocabulary_log_probs
from .search import ClusterSearch, ExactSearch, FaissSearch, MassSearch, Rescored, Search
from .search.ivf import stores_exact_keys

# keep(similarities, matches), see Retriever.target_log_probs
Keep = Callable[[Tensor, Tensor | None], None]
ROWS_AT_ONCE = 1 << 12  # queries, times k neighbours, whose probabilities are in memory at once


class Retriever:
    """One datastore as a distribution over the next token."""

    def __init__(
        self,
        datastore: Datastore,
        engine: Search | MassSearch,
        k: int | None,
        weight: float,
        temperature: float,
        metric: str,
        extractor: KeyExtractor | None = None,
        identity: dict[str, Any] | None = None,
    ):
        """
        Args:
            k: neighbours per query; None: every visited entry
            weight: lambda
            identity: what decides which neighbours are found, for --knn-save
        """
        self.datastore, self.engine, self.k, self.weight = datastore, engine, k, weight
        self.temperature, self.metric, self.extractor = temperature, metric, extractor
        self.identity = identity or {}
        self.preferred_queries = engine.preferred_queries
        self.name = datastore.folder.name
        # Doubles and halves, and others half-way between those: what TargetMass computes two at the price of one.
        between = float(f"{temperature * 2**0.5:.4g}")
        self.other_temperatures = sorted(
            [temperature * double for double in (0.25, 0.5, 2, 4)] + [between * double for double in (0.25, 0.5, 1, 2)]
        )
        self.entropy_sum = 0.0  # of the neighbours' shares, in nats; stays 0 where every visited entry takes part

    def target_log_probs(self, queries: Tensor, targets: Tensor, keep: Keep | None = None) -> Tensor:
        """log p_kNN: queries (n, dim), targets (n,) -> (n,) on the targets' device; -inf where not retrieved.

        Args:
            keep: called for consecutive rows of the n with (similarities (rows, k), matches (rows, k)); where every
                visited entry takes part, with (log p_kNN (n, temperatures), None), at the temperature and at
                ``other_temperatures``
        """
        vectors, wanted = np.ascontiguousarray(queries.float().cpu().numpy()), targets.cpu().numpy()
        if self.k is None:
            temperatures = [self.temperature, *(self.other_temperatures if keep else [])]
            target_mass, total_mass = self.engine.target_mass(vectors, wanted, temperatures)
            with np.errstate(invalid="ignore"):  # -inf - -inf: nothing was visited
                log_probs = np.nan_to_num(target_mass - total_mass, nan=-np.inf, neginf=-np.inf)
            log_probs = torch.from_numpy(log_probs).float()
            if keep is not None:
                keep(log_probs.T, None)
            return log_probs[0].to(targets.device)
        log_probs = []
        for distances, ids in self.engine.search_in_parts(vectors, self.k):
            own, wanted = wanted[: len(ids)], wanted[len(ids) :]
            for first in range(0, len(ids), ROWS_AT_ONCE):
                rows = slice(first, first + ROWS_AT_ONCE)
                log_probs.append(self._of_targets(distances[rows], ids[rows], own[rows], keep))
        return torch.cat(log_probs).to(targets.device) if log_probs else torch.empty(0)

    def _of_targets(self, distances: np.ndarray, ids: np.ndarray, targets: np.ndarray, keep: Keep | None) -> Tensor:
        """distances (n, k), ids (n, k), targets (n,) -> log p_kNN (n,)."""
        matches = self.datastore.values[np.maximum(ids, 0)] == targets[:, None]
        matches = torch.from_numpy(matches & (ids >= 0))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        weights = neighbor_log_weights(near, 1 / self.temperature)
        self.entropy_sum += entropy(weights).double().sum().item()
        if keep is not None:
            keep(near, matches)
        return target_log_probs(weights, matches)

    def vocabulary_log_probs(self, queries: Tensor, vocabulary_size: int) -> Tensor:
        """log p_kNN of every token: queries (n, dim) -> (n, vocabulary) on the CPU."""
        vectors = np.ascontiguousarray(queries.float().cpu().numpy())
        if self.k is None:
            return torch.cat([self._of_all_visited(vector[None], vocabulary_size) for vector in vectors])
        return self._of_neighbors(*self.engine.search(vectors, self.k), vocabulary_size)

    def _of_all_visited(self, vector: np.ndarray, vocabulary_size: int) -> Tensor:
        return self._of_neighbors(*self.engine.visited(vector), vocabulary_size)

    def _of_neighbors(self, distances: np.ndarray, ids: np.ndarray, vocabulary_size: int) -> Tensor:
        values = torch.from_numpy(self.datastore.values[np.maximum(ids, 0)].astype(np.int64))
        near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), self.metric)
        return vocabulary_log_probs(neighbor_log_weights(near, 1 / self.temperature), values, vocabulary_size)


def open_retrievers(args, model: nn.Module, dictionary_facts: dict[str, Any]) -> list[Retriever]:
    """Everything ``--knn-datastore`` and its companions ask for, checked against the model."""
    folders = args.knn_datastore.split(",")
    weights = parse_weights(args.knn_lambda, len(folders))
    k = parse_k(args.knn_k)
    if not args.knn_temperature > 0:
        raise KnnlmError(f"--knn-temperature must be above 0, not {args.knn_temperature:g}")
    if args.knn_nprobe < 1:
        raise KnnlmError(f"--knn-nprobe must be 1 or more, not {args.knn_nprobe}")
    metric, mask, score = str(args.knn_metric), str(args.knn_mask), str(args.knn_score)
    retrievers = []
    fingerprint = weights_fingerprint(model)
    for folder, weight in zip(folders, weights):
        datastore = Datastore(folder)
        check_match(datastore, args, model, fingerprint, dictionary_facts)
        engine = make_engine(datastore, args.knn_index, k, metric, mask, score, args.knn_nprobe)
        layer = resolve_layer(model.decoder, datastore.manifest.layer)  # an imported one may say -1
        extractor = KeyExtractor(model, datastore.manifest.key, layer)
        identity = {
            "keys": datastore.fingerprint,
            "entries": len(datastore),
            "metric": metric,
            "mask": mask,
            "score": score,
            "index": args.knn_index or "default",
            "nprobe": args.knn_nprobe,
        }
        retrievers.append(Retriever(datastore, engine, k, weight, args.knn_temperature, metric, extractor, identity))
    return retrievers


def parse_weights(text: str, count: int) -> list[float]:
    """--knn-lambda: one value for every datastore, or one each."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise KnnlmError(f"--knn-lambda takes numbers separated by commas, not '{text}'") from error
    if len(weights) == 1:
        weights *= count
    if len(weights) != count:
        raise KnnlmError(f"--knn-lambda has {len(weights)} values for {count} datastores; give one, or one each")
    if any(not 0 <= weight <= 1 for weight in weights) or sum(weights) > 1 + 1e-9:
        raise KnnlmError(f"each --knn-lambda must be between 0 and 1 and their sum at most 1, not {text}")
    return weights


def parse_k(text: str) -> int | None:
    """--knn-k: a number, or None for 'all'."""
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise KnnlmError(f"--knn-k takes a number from 1 up or 'all', not '{text}'")
    return int(text)


def check_match(datastore: Datastore, args, model: nn.Module, fingerprint: str, dictionary_facts: dict) -> None:
    """Refuse a datastore whose keys or values mean something else to this model."""
    manifest, source, folder = datastore.manifest, datastore.manifest.source, datastore.folder
    remedy = "dump a datastore for it with --knn-dump"
    if source.get("dictionary_sha256") not in (None, dictionary_facts["dictionary_sha256"]):
        raise KnnlmError(
            f"{folder} was made with another dictionary ({source.get('dictionary_size'):,} types, here "
            f"{dictionary_facts['dictionary_size']:,}); score data binarised with --srcdict of its data, or {remedy}"
        )
    if manifest.dim != key_dimension(model):
        raise KnnlmError(f"{folder} has keys of dimension {manifest.dim}, the model {key_dimension(model)}; {remedy}")
    if source.get("checkpoint_sha256") not in (None, fingerprint):
        raise KnnlmError(f"{folder} was made with another checkpoint than --path; use that one, or {remedy}")
    if args.knn_key and str(args.knn_key) != manifest.key:
        raise KnnlmError(
            f"{folder} holds the key {manifest.key}, not {args.knn_key}; leave --knn-key out, or {remedy}"
        )
    layer = resolve_layer(model.decoder, manifest.layer)
    if args.knn_layer is not None and resolve_layer(model.decoder, args.knn_layer) != layer:
        raise KnnlmError(
            f"{folder} holds keys of layer {layer}, not {args.knn_layer}; leave --knn-layer out, or {remedy}"
        )


def make_engine(
    datastore: Datastore, spec: str | None, k: int | None, metric: str, mask: str, score: str, nprobe: int
) -> Search | MassSearch:
    """The engine for a choice of neighbours (mask) and distances (score)."""
    if mask == "exact" and score == "exact":
        return ExactSearch(datastore, metric)
    info = build_index_if_missing(datastore, spec, metric)
    index = open_index(datastore, info)
    if index is None:  # flat: the index's neighbours and distances are the exact ones
        return ExactSearch(datastore, metric)
    ivf = extract_ivf(index)
    if k is None:
        if score == "index":
            raise KnnlmError("--knn-k all is exact by definition; leave out --knn-score index")
        if ivf is None:
            raise KnnlmError(f"--knn-k all needs an index with clusters, not {info.factory}; use --knn-index auto")
        return ClusterSearch(index, datastore, metric, nprobe)
    if mask == "exact":
        if ivf is not None:
            ivf.make_direct_map()
        return Rescored(ExactSearch(datastore, metric), index.reconstruct_batch, metric)
    if stores_exact_keys(index, datastore):  # the index's distances are the exact ones
        return ClusterSearch(index, datastore, metric, nprobe)
    engine = FaissSearch(index, nprobe)
    return engine if score == "index" else Rescored(engine, datastore.gather_keys, metric)
