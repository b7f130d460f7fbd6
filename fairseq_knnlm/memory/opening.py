"""From the flags to the memories that they ask for, checked against the model."""

import re
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary

from ..datastore import Datastore
from ..errors import KnnlmError
from ..keys import (
    DEFAULT_KEY,
    KEYS,
    KeyExtractor,
    Model,
    check_model,
    key_dimension,
    resolve_layer,
    weights_fingerprint,
)
from .cache import ContinuousCache, Documents
from .datastore_memory import DatastoreMemory
from .devices import choose_device
from .engines import choose_index, make_engine


def open_datastores(args: Any, model: Model, dictionary_facts: dict[str, Any]) -> list[DatastoreMemory]:
    """Everything ``--knn-datastore`` and its companions ask for, checked against the model."""
    folders = args.knn_datastore.split(",")
    weights = parse_weights(args.knn_lambda, len(folders))
    k = parse_k(args.knn_k)
    if not args.knn_temperature > 0:
        raise KnnlmError(f"--knn-temperature must be above 0, not {args.knn_temperature:g}")
    if args.knn_nprobe < 1:
        raise KnnlmError(f"--knn-nprobe must be 1 or more, not {args.knn_nprobe}")
    metric, mask, score = str(args.knn_metric), str(args.knn_mask), str(args.knn_score)
    far = parse_far(args.knn_far, k)
    check_model(model)
    memories = []
    fingerprint = weights_fingerprint(model)
    for folder, weight in zip(folders, weights):
        datastore = Datastore(folder)
        check_match(datastore, args, model, fingerprint, dictionary_facts)
        info = choose_index(datastore, args.knn_index, k, metric, mask, score)
        device = choose_device(args.knn_device, next(model.parameters()).device, info)
        engine = make_engine(datastore, info, k, metric, mask, score, args.knn_nprobe, far, device)
        layer = resolve_layer(model.decoder, datastore.manifest.layer)  # an imported one may say -1
        extractor = KeyExtractor(model, datastore.manifest.key, layer)
        identity = {
            "keys": datastore.fingerprint,
            "entries": len(datastore),
            "metric": metric,
            "mask": mask,
            "score": score,
            "index": info.name if info else "flat",
            "nprobe": args.knn_nprobe,
            **({"far": far} if far else {}),
        }
        temperature = args.knn_temperature
        memories.append(DatastoreMemory(datastore, engine, k, weight, temperature, metric, extractor, identity))
    return memories


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


def parse_far(far: int, k: int | None) -> int:
    """--knn-far: how many lists are in the far field."""
    if far < 0:
        raise KnnlmError(f"--knn-far must be 0 or more, not {far}")
    if far and k is not None:
        raise KnnlmError("--knn-far goes with --knn-k all; leave one of them out")
    return far


def check_match(datastore: Datastore, args: Any, model: Model, fingerprint: str, dictionary_facts: dict) -> None:
    """Refuse a datastore whose keys or values mean something else to this model."""
    manifest, source, folder = datastore.manifest, datastore.manifest.source, datastore.folder
    remedy = "dump a datastore for it with --knn-dump"
    if source.get("dictionary_sha256") not in (None, dictionary_facts["dictionary_sha256"]):
        raise KnnlmError(
            f"{folder} was made with another dictionary ({source.get('dictionary_size'):,} types, here "
            f"{dictionary_facts['dictionary_size']:,}); score data binarised with --srcdict of its data, or {remedy}"
        )
    if manifest.key not in KEYS:
        raise KnnlmError(f"{folder} holds the unknown key {manifest.key}, so its manifest is damaged; {remedy}")
    if manifest.source_dim != key_dimension(model):
        dim = manifest.source_dim
        raise KnnlmError(f"{folder} has keys of dimension {dim}, the model {key_dimension(model)}; {remedy}")
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


def open_cache(
    args: Any, model: Model, datastores: list[DatastoreMemory], documents: Documents | None, position: int
) -> ContinuousCache:
    """What ``--knn-cache-size`` and its companions ask for.

    Args:
        position: of the first token that it will see, in the corpus
    """
    if args.knn_cache_size < 0:
        raise KnnlmError(f"--knn-cache-size must be 0 or more, not {args.knn_cache_size}")
    if not args.knn_cache_theta >= 0:
        raise KnnlmError(f"--knn-cache-theta must be 0 or more, not {args.knn_cache_theta:g}")
    total = args.knn_cache_lambda + sum(memory.weight for memory in datastores)
    if not 0 <= args.knn_cache_lambda <= 1 or total > 1 + 1e-9:
        raise KnnlmError(
            f"--knn-cache-lambda must be between 0 and 1, and at most 1 together with --knn-lambda, not {total:g}"
        )
    check_model(model)
    if datastores:
        key, layer = datastores[0].datastore.manifest.key, datastores[0].datastore.manifest.layer
    else:
        key, layer = str(args.knn_key or DEFAULT_KEY), args.knn_layer
    layer = resolve_layer(model.decoder, layer)
    identity = {"boundary": args.knn_cache_boundary, "key": key, "layer": layer}
    return ContinuousCache(
        args.knn_cache_size, args.knn_cache_theta, documents, position, args.knn_cache_lambda,
        KeyExtractor(model, key, layer), identity,
    )  # fmt: skip


def find_documents(lines: Any, dictionary: Dictionary, boundary: str) -> Documents:
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


