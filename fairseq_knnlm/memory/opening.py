"""From the flags to the memories that they ask for, checked against the model."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from ..data.text_encoding import TextForm
from ..datastore import Datastore
from ..errors import KnnlmError
from ..keys import (
    DEFAULT_KEY,
    KEYS,
    KeyExtractor,
    Model,
    check_model,
    key_dimension,
    members_of,
    resolve_layer,
    weights_fingerprint,
)
from ..machine import building_device
from ..search.early import VisitRule
from .cache import ContinuousCache, Documents
from .datastore_memory import DatastoreMemory
from .defaults import choose_cache_values, choose_values, parse_temperatures, parse_weights
from .devices import choose_devices, search_precision
from .engines import RayCluster, choose_index, make_engine
from .extent import NUMBER, limit_nprobe, lists_to_visit, parse_far, parse_k
from .head_memory import HeadMemory
from .presets import flag

logger = logging.getLogger(__name__)


def open_datastores(
    args: Any,
    model: Model,
    dictionary_facts: dict[str, Any],
    heads: Sequence[str] = (),
    rules: list[VisitRule | None] | None = None,
) -> list[DatastoreMemory]:
    """Everything ``--knn-datastore`` and its companions ask for, checked against the model.

    Args:
        heads: fingerprints of the heads of the mixture
        rules: of each datastore, which lists are not worth a visit
    """
    metric, mask, score = str(args.knn_metric), str(args.knn_mask), str(args.knn_score)
    folders = args.knn_datastore.split(",")
    _check_numbers(args, len(folders))
    cluster = choose_cluster(args)
    datastores = [Datastore(folder) for folder in folders]
    owners = _owners(datastores, args, members_of(model), dictionary_facts)
    given, spec = flag(args, "knn_k"), flag(args, "knn_index")
    wanted = NUMBER if given is None else parse_k(given)  # whatever index there is can find a number of neighbours
    first_weights = next(model.parameters())
    builder = building_device("auto" if cluster else args.knn_device, first_weights.device)
    indexes = [choose_index(datastore, spec, wanted, metric, mask, score, builder) for datastore in datastores]
    values = choose_values(args, datastores, indexes, heads)
    memories = []
    every = [None] * len(datastores) if rules is None else rules
    for datastore, owner, info, weight, temperature, far, rule in zip(
        datastores, owners, indexes, values.weights, values.temperatures, values.far, every
    ):
        nprobe = limit_nprobe(lists_to_visit(args), info)
        if cluster is None:
            devices = choose_devices(args.knn_device, first_weights.device, info)
            precision = search_precision(first_weights.dtype, devices)
        else:  # the actors have devices, and only GPUs among them take half precision
            devices, precision = [torch.device("cpu")], first_weights.dtype
        engine = make_engine(
            datastore, info, values.k, metric, mask, score, nprobe, far, devices, precision, rule, cluster
        )
        layer = resolve_layer(owner.decoder, datastore.manifest.layer)  # an imported one may say -1
        extractor = KeyExtractor(owner, datastore.manifest.key, layer)
        identity = {
            "keys": datastore.fingerprint,
            "entries": len(datastore),
            "metric": metric,
            "mask": mask,
            "score": score,
            "index": info.name if info else "flat",
            "nprobe": lists_to_visit(args),
            **({"far": far} if far else {}),
        }
        memories.append(DatastoreMemory(datastore, engine, values.k, weight, temperature, metric, extractor, identity))
    return memories


def _owners(
    datastores: list[Datastore], args: Any, members: list[Model], dictionary_facts: dict[str, Any]
) -> list[Model]:
    """For each datastore the model whose states its keys are, checked: the only one, or a member of an ensemble."""
    fingerprints = [weights_fingerprint(member) for member in members]
    owners = []
    for datastore in datastores:
        number = 0
        if len(members) > 1:
            number = _number_of_owner(datastore, fingerprints)
            logger.info(f"{datastore.folder} holds keys of checkpoint {number + 1} of the {len(members)} of --path")
        check_model(members[number])
        check_match(datastore, args, members[number], fingerprints[number], dictionary_facts)
        owners.append(members[number])
    return owners


def _number_of_owner(datastore: Datastore, fingerprints: list[str]) -> int:
    """Which of several models made a datastore."""
    made_by = datastore.manifest.source.get("checkpoint_sha256")
    if made_by is None:
        raise KnnlmError(
            f"{datastore.folder} does not say which checkpoint made it, so it is not known whose keys it holds; give "
            "--path that one alone, or dump a datastore with --knn-dump"
        )
    if made_by not in fingerprints:
        raise KnnlmError(
            f"{datastore.folder} was made with none of the {len(fingerprints)} checkpoints of --path; add the one that "
            "made it, or dump a datastore for one of them with --knn-dump"
        )
    return fingerprints.index(made_by)


def _check_numbers(args: Any, count: int) -> None:
    """Refuse numbers that make no sense before anything is opened or built."""
    for name, parse in (("knn_lambda", parse_weights), ("knn_temperature", parse_temperatures)):
        if (value := flag(args, name)) is not None:
            parse(value, count)
    k = flag(args, "knn_k")
    if args.knn_far is not None:
        parse_far(args.knn_far, None if k is None else parse_k(k))
    limit_nprobe(lists_to_visit(args), None)


def choose_cluster(args: Any) -> RayCluster | None:
    """What --knn-engine ray asks for; None: this process searches itself."""
    if str(args.knn_engine) == "local":
        if args.knn_ray_address != "auto":
            raise KnnlmError("--knn-ray-address does nothing without --knn-engine ray; add that, or leave it out")
        return None
    if str(args.knn_engine) != "ray":
        raise KnnlmError(f"--knn-engine takes local or ray, not '{args.knn_engine}'")
    cluster = RayCluster(args.knn_ray_address, args.knn_device)
    cluster.check(str(args.knn_mask), str(args.knn_score))
    return cluster


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
        raise KnnlmError(f"{folder} holds the key {manifest.key}, not {args.knn_key}; leave --knn-key out, or {remedy}")
    layer = resolve_layer(model.decoder, manifest.layer)
    if args.knn_layer is not None and resolve_layer(model.decoder, args.knn_layer) != layer:
        raise KnnlmError(
            f"{folder} holds keys of layer {layer}, not {args.knn_layer}; leave --knn-layer out, or {remedy}"
        )


def open_cache(
    args: Any, model: Model, datastores: list[DatastoreMemory], documents: Documents | None, position: int,
    heads: Sequence[HeadMemory] = (),
) -> ContinuousCache:  # fmt: skip
    """What ``--knn-cache-size`` and its companions ask for. Of several models, its states are of the one that the
    first datastore is of, or of the first.

    Args:
        position: of the first token that it will see, in the corpus
    """
    if args.knn_cache_size < 0:
        raise KnnlmError(f"--knn-cache-size must be 0 or more, not {args.knn_cache_size}")
    k = datastores[0].k if datastores else None
    weight, theta = choose_cache_values(
        args, [memory.datastore for memory in datastores], k, [memory.identity["head"] for memory in heads]
    )
    if not theta >= 0:
        raise KnnlmError(f"--knn-cache-theta must be 0 or more, not {theta:g}")
    total = weight + sum(memory.weight for memory in (*datastores, *heads))
    if not 0 <= weight <= 1 or total > 1 + 1e-9:
        raise KnnlmError(
            f"--knn-cache-lambda must be between 0 and 1, and at most 1 together with --knn-lambda "
            f"and --knn-head-lambda, not {total:g}"
        )
    first = datastores[0].extractor if datastores else None
    model = members_of(model)[0] if first is None else first.model
    check_model(model)
    if datastores:
        key, layer = datastores[0].datastore.manifest.key, datastores[0].datastore.manifest.layer
    else:
        key, layer = str(args.knn_key or DEFAULT_KEY), args.knn_layer
    layer = resolve_layer(model.decoder, layer)
    identity = {"boundary": args.knn_cache_boundary, "key": key, "layer": layer}
    return ContinuousCache(
        args.knn_cache_size, theta, documents, position, weight, KeyExtractor(model, key, layer), identity,
    )  # fmt: skip


def find_documents(lines: Any, dictionary: Dictionary, text: TextForm, boundary: str) -> Documents:
    """Documents begin with the lines that ``--knn-cache-boundary`` names."""

    def written(line: Tensor) -> str:
        return text.passage([token for token in line.tolist() if token != text.end]).removesuffix("\n")

    if boundary.startswith("re:"):
        try:
            pattern = re.compile(boundary[3:])
        except re.error as error:
            raise KnnlmError(f"--knn-cache-boundary {boundary} is not a regular expression ({error})") from error
        found = [pattern.fullmatch(written(line)) is not None for line in lines]
    else:
        wanted = torch.tensor(text.encode(boundary))
        if (wanted == dictionary.unk()).any():
            raise KnnlmError(f"--knn-cache-boundary '{boundary}' has words that are not in the dictionary")
        found = [torch.equal(line.long(), wanted) for line in lines]
    if not any(found):
        raise KnnlmError(
            f"no line of the text is '{boundary}'; give --knn-cache-boundary a whole line as it was tokenised, or "
            "re:PATTERN"
        )
    return Documents(np.asarray(lines.sizes, np.int64), np.array(found))
