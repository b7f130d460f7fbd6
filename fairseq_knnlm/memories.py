"""From the flags to what is mixed besides the datastores: the continuous cache; and what --knn-save writes of each."""

import re
from dataclasses import fields

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import nn

from .cache import ContinuousCache, Documents
from .config import KNNLanguageModelingConfig
from .errors import KnnlmError
from .keys import DEFAULT_KEY, KeyExtractor, check_model, resolve_layer
from .retrieval import Retriever
from .save import MemoryFacts
from .scorer import Cache


def open_cache(
    args, model: nn.Module, retrievers: list[Retriever], documents: Documents | None, position: int
) -> Cache:
    """What ``--knn-cache-size`` and its companions ask for.

    Args:
        position: of the first token that it will see, in the corpus
    """
    if args.knn_cache_size < 0:
        raise KnnlmError(f"--knn-cache-size must be 0 or more, not {args.knn_cache_size}")
    if not args.knn_cache_theta >= 0:
        raise KnnlmError(f"--knn-cache-theta must be 0 or more, not {args.knn_cache_theta:g}")
    total = args.knn_cache_lambda + sum(retriever.weight for retriever in retrievers)
    if not 0 <= args.knn_cache_lambda <= 1 or total > 1 + 1e-9:
        raise KnnlmError(
            f"--knn-cache-lambda must be between 0 and 1, and at most 1 together with --knn-lambda, not {total:g}"
        )
    check_model(model)
    if retrievers:
        key, layer = retrievers[0].datastore.manifest.key, retrievers[0].datastore.manifest.layer
    else:
        key, layer = str(args.knn_key or DEFAULT_KEY), args.knn_layer
    cache = ContinuousCache(args.knn_cache_size, args.knn_cache_theta, documents, position)
    layer = resolve_layer(model.decoder, layer)
    identity = {"boundary": args.knn_cache_boundary, "key": key, "layer": layer}
    return Cache(cache, args.knn_cache_lambda, KeyExtractor(model, key, layer), identity)


def find_documents(lines, dictionary: Dictionary, boundary: str) -> Documents:
    """Documents begin with the lines that ``--knn-cache-boundary`` names."""
    if boundary.startswith("re:"):
        try:
            pattern = re.compile(boundary[3:])
        except re.error as error:
            raise KnnlmError(f"--knn-cache-boundary {boundary} is not a regular expression ({error})") from error
        found = [pattern.fullmatch(dictionary.string(line)) is not None for line in lines]
    else:
        wanted = dictionary.encode_line(boundary, add_if_not_exist=False, append_eos=True).long()
        if (wanted == dictionary.unk()).any():
            raise KnnlmError(f"--knn-cache-boundary '{boundary}' has words that are not in the dictionary")
        found = [torch.equal(line.long(), wanted) for line in lines]
    if not any(found):
        raise KnnlmError(
            f"no line of the text is '{boundary}'; give --knn-cache-boundary a whole line as it was tokenised, or "
            "re:PATTERN"
        )
    return Documents(np.asarray(lines.sizes, np.int64), np.array(found))


def describe_memories(retrievers: list[Retriever], cache: Cache | None) -> list[MemoryFacts]:
    """The memories of a run, for --knn-save."""
    memories = []
    for number, retriever in enumerate(retrievers):
        sharpness, k = 1 / retriever.temperature, retriever.k
        temperatures = [retriever.temperature, *retriever.other_temperatures] if k is None else None
        k = None if k is None else min(k, len(retriever.datastore))
        memories.append(
            MemoryFacts(f"knn{number}", k, retriever.weight, sharpness, retriever.identity, temperatures)
        )
    if cache:
        memory = cache.memory
        memories.append(MemoryFacts("cache", memory.size, cache.weight, memory.theta, cache.identity))
    return memories


def refuse_idle_flags(args) -> None:
    """A flag that does nothing is a mistake worth hearing of."""
    for flag in fields(KNNLanguageModelingConfig):
        if not flag.name.startswith("knn_") or str(getattr(args, flag.name)) == str(flag.default):
            continue
        cached, needs = args.knn_cache_size, "--knn-datastore or --knn-dump"
        if flag.name == "knn_save":
            continue
        if flag.name.startswith("knn_cache"):
            idle, needs = not cached, "--knn-cache-size"
        elif flag.name in ("knn_key", "knn_layer"):
            idle = not (args.knn_datastore or cached)
        else:
            idle = not args.knn_datastore
        if idle:
            name = "--" + flag.name.replace("_", "-")
            raise KnnlmError(f"{name} does nothing without {needs}; add one, or leave it out")
