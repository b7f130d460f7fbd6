"""From ``--knn-head`` to memories, checked against the model."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..datastore import Datastore
from ..datastore.tuned import read_tuned
from ..errors import KnnlmError
from ..heads import HeadFacts, open_head
from ..heads.head_file import read_head_facts
from ..keys import (
    KEYS,
    KeyExtractor,
    Model,
    check_model,
    key_dimension,
    members_of,
    resolve_layer,
    weights_fingerprint,
)
from ..search.early import VisitRule
from .base import Memory
from .datastore_memory import DatastoreMemory
from .defaults import find_tuned, parse_head_weights
from .head_memory import HeadMemory
from .opening import open_datastores
from .presets import has_fixed_mixture

logger = logging.getLogger(__name__)

WEIGHT = 0.25


def open_memories(
    args: Any, model: Model, dictionary_facts: dict[str, Any], rules: list[VisitRule | None] | None = None
) -> list[Memory]:
    """The datastores, then the heads, that the flags ask for.

    Args:
        rules: of each datastore, which lists are not worth a visit
    """
    datastores: list[DatastoreMemory] = []
    if args.knn_datastore:
        datastores = open_datastores(args, model, dictionary_facts, head_fingerprints(args), rules)
    return [*datastores, *open_heads(args, model, dictionary_facts, datastores)]


def open_heads(
    args: Any, model: Model, dictionary_facts: dict[str, Any], datastores: Sequence[DatastoreMemory] = ()
) -> list[HeadMemory]:
    """Everything that ``--knn-head`` and ``--knn-head-lambda`` ask for, beside the datastores of the mixture."""
    if not args.knn_head:
        if args.knn_head_lambda is not None:
            raise KnnlmError("--knn-head-lambda does nothing without --knn-head; add it, or leave this out")
        return []
    folders = args.knn_head.split(",")
    if args.knn_head_lambda is not None:
        parse_head_weights(args.knn_head_lambda, len(folders))
    members = members_of(model)
    for member in members:
        check_model(member)
    fingerprints = [weights_fingerprint(member) for member in members]
    heads, owners = [open_head(folder) for folder in folders], []
    for folder, (_, facts) in zip(folders, heads):
        # Of several models, the one that it was learnt with; if there is none, the check says so.
        source = facts.source.get("checkpoint_sha256")
        number = fingerprints.index(source) if source in fingerprints else 0
        check_head(folder, facts, args, members[number], fingerprints[number], dictionary_facts)
        owners.append(members[number])
    facts_of = [facts for _, facts in heads]
    weights = _choose_weights(args, folders, facts_of, datastores)
    total = sum(weights) + sum(memory.weight for memory in datastores)
    if total > 1 + 1e-9:
        raise KnnlmError(f"--knn-lambda and --knn-head-lambda must be at most 1 together, not {total:g}")
    device = next(model.parameters()).device
    memories = []
    for folder, (head, facts), weight, owner in zip(folders, heads, weights, owners):
        extractor = KeyExtractor(owner, facts.key, resolve_layer(owner.decoder, facts.layer))
        identity = {
            "head": facts.fingerprint, "kind": facts.kind, "rows": facts.row_count, "metric": facts.metric,
            "temperature": facts.temperature,
        }  # fmt: skip
        place = str(Path(folder).resolve())
        memories.append(HeadMemory(head.to(device), weight, Path(folder).name, extractor, identity, place))
    return memories


def head_fingerprints(args: Any) -> list[str]:
    """Of the heads that ``--knn-head`` names."""
    return [read_head_facts(folder).fingerprint for folder in args.knn_head.split(",")] if args.knn_head else []


def check_head(
    folder: str, facts: HeadFacts, args: Any, model: Model, fingerprint: str, dictionary_facts: dict[str, Any]
) -> None:
    """Refuse a head whose keys or words mean something else to this model."""
    source = facts.source
    remedy = "learn one for it with knnlm learn"
    if source.get("dictionary_sha256") not in (None, dictionary_facts["dictionary_sha256"]):
        raise KnnlmError(
            f"{folder} was learnt with another dictionary ({facts.vocabulary:,} types, here "
            f"{dictionary_facts['dictionary_size']:,}); score data binarised with --srcdict of its data, or {remedy}"
        )
    if facts.vocabulary > dictionary_facts["dictionary_size"]:
        raise KnnlmError(f"{folder} has {facts.vocabulary:,} words, more than the dictionary; {remedy}")
    if facts.key not in KEYS:
        raise KnnlmError(f"{folder} reads the unknown key {facts.key}, so it is damaged; {remedy}")
    if facts.source_dim != key_dimension(model):
        raise KnnlmError(f"{folder} reads keys of dimension {facts.source_dim}, the model has {key_dimension(model)}; "
                         f"{remedy}")  # fmt: skip
    if source.get("checkpoint_sha256") not in (None, fingerprint):
        raise KnnlmError(f"{folder} was learnt with another checkpoint than --path; use that one, or {remedy}")
    if args.knn_key and str(args.knn_key) != facts.key:
        raise KnnlmError(f"{folder} reads the key {facts.key}, not {args.knn_key}; leave --knn-key out, or {remedy}")
    layer = resolve_layer(model.decoder, facts.layer)
    if args.knn_layer is not None and resolve_layer(model.decoder, args.knn_layer) != layer:
        raise KnnlmError(
            f"{folder} reads keys of layer {layer}, not {args.knn_layer}; leave --knn-layer out, or {remedy}"
        )


def _choose_weights(
    args: Any, folders: list[str], heads: list[HeadFacts], datastores: Sequence[DatastoreMemory]
) -> list[float]:
    """Lambda of each head: of the flag, as tuned for this very mixture, or the default."""
    if args.knn_head_lambda is not None:
        return parse_head_weights(args.knn_head_lambda, len(folders))
    names = [facts.fingerprint for facts in heads]
    if datastores:
        stores: list[Datastore] = [memory.datastore for memory in datastores]
        tuned, _ = ([], "") if has_fixed_mixture(args) else find_tuned(args, stores, {datastores[0].k is None}, names)
        found, origin = (tuned[0].heads, tuned[0].origin) if tuned else ({}, "")
    else:
        kept = read_tuned(Path(folders[0]), names[0])
        with_cache = bool(args.knn_cache_size)
        kept = [k for k in kept if set(k.heads) == set(names) and (k.cache_size is not None) == with_cache]
        found, origin = (kept[-1].heads, kept[-1].origin) if kept else ({}, "")
    if not found:
        return [WEIGHT] * len(folders)
    weights = [float(found[name]) for name in names]
    said = ",".join(f"{weight:g}" for weight in weights)
    logger.info(f"head lambda {said} as {origin}, knnlm tune --keep; give --knn-head-lambda for others")
    return weights
