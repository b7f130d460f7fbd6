"""From ``--knn-gate`` and ``--knn-gate-skip`` to a gate that fits the run, and what it decides for the memories."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from fairseq.data import Dictionary

from ..data.dictionaries import dictionary_facts
from ..errors import KnnlmError
from ..keys import Model, weights_fingerprint
from ..memory import Memory, name_memories
from ..memory.head_opening import open_memories
from ..memory.presets import flag
from ..mixture.gate import Gate, check_fits, check_names
from ..search.early import VisitRule

CHOSEN = ("lambda", "temperature", "head-lambda", "cache-lambda", "cache-theta")  # by the gate


def open_gate(args: Any) -> Gate | None:
    """The gate of ``--knn-gate``, checked against the other flags."""
    if not args.knn_gate:
        if args.knn_gate_skip:
            raise KnnlmError("--knn-gate-skip does nothing without --knn-gate; add one, or leave it out")
        return None
    for name in CHOSEN:
        if getattr(args, f"knn_{name.replace('-', '_')}") is not None:
            raise KnnlmError(f"--knn-gate decides --knn-{name}; leave one of them out")
    gate = Gate.open(str(args.knn_gate))
    check_names(gate, _names(args))
    return gate


def _names(args: Any) -> list[str]:
    """The names of the memories that the flags ask for."""
    given = {"knn": args.knn_datastore, "head": args.knn_head}
    names = [f"{kind}{number}" for kind, value in given.items() if value for number in range(len(value.split(",")))]
    return names + (["cache"] if args.knn_cache_size else [])


def with_gate_values(args: Any, gate: Gate | None) -> Any:
    """The flags, with temperatures, k and the like as the gate was trained with."""
    if gate is None:
        return args
    args = copy.deepcopy(args)
    datastores = [memory for memory in gate.memories if memory.name.startswith("knn")]
    if datastores:
        args.knn_lambda = ",".join(repr(memory.weight) for memory in datastores)
        args.knn_temperature = ",".join(repr(1 / memory.sharpness) for memory in datastores)
        if flag(args, "knn_k") is None:
            args.knn_k = str(datastores[0].neighbors or "all")
    if heads := [memory for memory in gate.memories if memory.name.startswith("head")]:
        args.knn_head_lambda = ",".join(repr(memory.weight) for memory in heads)
    for memory in gate.memories:
        if memory.name == "cache":
            args.knn_cache_lambda, args.knn_cache_theta = memory.weight, memory.sharpness
    return args


def visit_rules(args: Any, gate: Gate | None) -> list[VisitRule | None] | None:
    """For each datastore which of its lists are visited; None: all lists of all."""
    share = args.knn_gate_skip
    if gate is None or not share:
        return None
    if not 0 <= share < 1:
        raise KnnlmError(f"--knn-gate-skip is the share of list visits to leave out, from 0 to below 1, not {share:g}")
    return [gate_rule(gate, memory.name, share) for memory in gate.memories if memory.name.startswith("knn")]


def gate_rule(gate: Gate, name: str, share: float) -> VisitRule:
    """The rule that leaves out this share of a datastore's list visits, on text like that which it was learnt from."""
    facts = gate.facts.skip.get(name)
    if facts is None:
        raise KnnlmError(
            f"the gate knows nothing of the lists of {name}, so --knn-gate-skip has nothing to go by; score with "
            "--knn-k all and an index of this release, save that, and train the gate again"
        )
    place = share * (len(facts["thresholds"]) - 1)
    low = math.floor(place)
    high = min(low + 1, len(facts["thresholds"]) - 1)
    least = facts["thresholds"][low] + (place - low) * (facts["thresholds"][high] - facts["thresholds"][low])
    return VisitRule(least, facts["rank"], facts["share"], facts["early"], facts["centre"])


def open_gated_memories(args: Any, gate: Gate | None, model: Model, dictionary: Dictionary) -> list[Memory]:
    """The datastores, then the heads, that the flags ask for, with the values of the gate."""
    return open_memories(with_gate_values(args, gate), model, dictionary_facts(dictionary), visit_rules(args, gate))


def open_mixture(args: Any, model: Model, dictionary: Dictionary) -> tuple[list[Memory], Gate | None]:
    """The memories and the gate of a mixture without a cache."""
    gate = open_gate(args)
    memories = open_gated_memories(args, gate, model, dictionary)
    attach(gate, memories, model, dictionary)
    return memories, gate


def attach(gate: Gate | None, memories: Sequence[Memory], model: Model, dictionary: Dictionary) -> None:
    """Let the memories tell what the gate looks at; refused where they are not those that it was trained with."""
    if gate is not None:
        facts = {**dictionary_facts(dictionary), "checkpoint_sha256": weights_fingerprint(model)}
        check_fits(gate, name_memories(list(memories)), facts)
        for memory in memories:
            memory.with_features = True
