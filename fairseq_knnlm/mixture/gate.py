"""The gate: the weights of LM and memories as a function of what is known of a token's context, never of the token.

A softmax over {LM, each memory} of b + A x + C tanh(B x + d), where x are the standardised features. It was trained by
``knnlm gate`` on a saved run and is one small file. A memory that found nothing gets no weight.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import KnnlmError
from ..memory import MemoryFacts
from ..memory.features import NEAREST, Features, mass_name
from ..storage import from_record, read_versioned, write_record
from .lm_features import LM_FEATURES

FORMAT = "fairseq-knnlm gate"
VERSION = 1
REMEDY = "make it with knnlm gate"
MOST = 5.0  # standard deviations that a feature may be away from its mean: other text has outliers, too
MASS = "mass x"  # a feature that is the mass at a multiple of the memory's own sharpness: "mass x2"

# What decides which neighbours a memory finds and what their distances mean; anything else changes features a little.
IDENTITY = ("keys", "head", "metric", "mask", "score", "boundary", "key", "layer")


@dataclass
class GateMemory:
    """A memory as it was when the gate was trained."""

    name: str
    identity: dict[str, Any]
    neighbors: int | None  # k, or the cache's size; None: every visited entry
    sharpness: float  # 1 / temperature, or theta
    weight: float  # the best constant one


@dataclass
class GateFacts:
    """What the file says."""

    source: dict[str, Any]  # of the text that it was trained on, and the model
    memories: list[GateMemory]
    features: list[str]  # lm.largest, knn0.nearest, knn0.mass x2, ...
    means: list[float]  # of the features
    scales: list[float]  # their standard deviations
    bias: list[float]  # (1 + memories)
    linear: list[list[float]] = field(default_factory=list)  # (1 + memories, features)
    hidden: list[list[float]] = field(default_factory=list)  # (units, features)
    hidden_bias: list[float] = field(default_factory=list)  # (units)
    output: list[list[float]] = field(default_factory=list)  # (1 + memories, units)
    skip: dict[str, Any] = field(default_factory=dict)  # of each datastore: which lists are worth a visit
    results: dict[str, Any] = field(default_factory=dict)  # perplexities when it was trained
    format: str = FORMAT
    version: int = VERSION


class Gate:
    """Gives the weights of the mixture for each token."""

    def __init__(self, facts: GateFacts):
        self.facts = facts
        self._means, self._scales, self._bias = (_vector(each) for each in (facts.means, facts.scales, facts.bias))
        self._linear, self._hidden, self._output = (_matrix(m) for m in (facts.linear, facts.hidden, facts.output))
        self._hidden_bias = _vector(facts.hidden_bias)

    @property
    def memories(self) -> list[GateMemory]:
        return self.facts.memories

    def log_weights(self, lm: Tensor, memories: list[Features]) -> Tensor:
        """Log of the weights of LM and memories: (n, LM_FEATURES), features of each memory -> (n, 1 + memories)."""
        features = feature_matrix(self.facts.features, self.memories, lm, memories)
        return self.log_weights_of(features, absent(memories, len(lm)))

    def log_weights_of(self, features: Tensor, missing: Tensor) -> Tensor:
        """(n, features), (n, memories) bool: those that found nothing -> (n, 1 + memories)."""
        logits = self._bias.expand(len(features), -1)
        if len(self._linear):
            scaled = standardise(features, self._means, self._scales)
            logits = logits + scaled @ self._linear.T
            if len(self._hidden):
                logits = logits + torch.tanh(scaled @ self._hidden.T + self._hidden_bias) @ self._output.T
        return masked(logits, missing).log_softmax(dim=1)

    def write(self, path: str | Path) -> None:
        write_record(Path(path), asdict(self.facts))

    @classmethod
    def open(cls, path: str | Path) -> "Gate":
        path = Path(path)
        if path.is_dir():
            raise KnnlmError(f"{path} is a folder, not the file of a gate; {REMEDY}")
        if not path.exists():
            raise KnnlmError(f"there is no gate {path}; {REMEDY}")
        content = read_versioned(path, FORMAT, VERSION, REMEDY)
        again = f"{REMEDY} again"
        memories = content.get("memories")
        if not isinstance(memories, list) or not all(isinstance(memory, dict) for memory in memories):
            raise KnnlmError(f"{path} is damaged (it lists no memories); {again}")
        content["memories"] = [from_record(GateMemory, memory, path, again) for memory in memories]
        facts = from_record(GateFacts, content, path, again)
        _check_shapes(facts, path)
        return cls(facts)


def _check_shapes(facts: GateFacts, path: Path) -> None:
    features, members, units = len(facts.features), 1 + len(facts.memories), len(facts.hidden)
    good = len(facts.means) == len(facts.scales) == features and len(facts.bias) == members
    good = good and all(scale > 0 for scale in facts.scales) and len(facts.hidden_bias) == units
    for matrix, rows, columns in ((facts.linear, members, features), (facts.output, members, units)):
        good = good and (not matrix or (len(matrix) == rows and all(len(row) == columns for row in matrix)))
    if not good or not all(len(row) == features for row in facts.hidden) or bool(facts.hidden) != bool(facts.output):
        raise KnnlmError(f"{path} is damaged (its numbers do not fit together); {REMEDY} again")


# --- features ---------------------------------------------------------------------------------------------------------


def feature_matrix(names: list[str], memories: list[GateMemory], lm: Tensor, found: list[Features]) -> Tensor:
    """The features of these names: of the LM (n, LM_FEATURES) and of each memory -> (n, names) double."""
    places = {memory.name: place for place, memory in enumerate(memories)}
    columns = []
    for name in names:
        owner, feature = name.split(".", 1)
        if owner == "lm":
            columns.append(lm[:, LM_FEATURES.index(feature)])
            continue
        own, known = memories[places[owner]], found[places[owner]]
        if feature.startswith(MASS):
            feature = mass_name(own.sharpness * float(feature.removeprefix(MASS)))
        if feature not in known:
            raise KnnlmError(f"the gate looks at {name}, which this run does not know; {REMEDY} from its own save")
        columns.append(known[feature])
    if not columns:
        return torch.zeros((len(lm), 0), dtype=torch.double)
    return torch.stack([column.double().cpu() for column in columns], dim=1)


def absent(memories: list[Features], count: int) -> Tensor:
    """Which memories have found nothing for each of ``count`` tokens, (n, memories) bool."""
    missing = torch.zeros((count, len(memories)), dtype=torch.bool)
    for place, known in enumerate(memories):
        if NEAREST in known:  # one that knows no nearest entry always has something to say
            missing[:, place] = known[NEAREST].cpu() == -torch.inf
    return missing


def standardise(features: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """(n, features) double; what is missing counts as the mean."""
    scaled = ((features - means) / scales).nan_to_num(nan=0.0, neginf=0.0, posinf=0.0)
    return scaled.clamp(-MOST, MOST)


def masked(logits: Tensor, missing: Tensor) -> Tensor:
    """No weight for memories that found nothing: (n, 1 + memories), (n, memories) bool."""
    return torch.cat([logits[:, :1], logits[:, 1:].masked_fill(missing, -torch.inf)], dim=1)


def _vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.double)


def _matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.double)


# --- whether it fits --------------------------------------------------------------------------------------------------


def check_names(gate: Gate, names: list[str]) -> None:
    """Refuse a gate for other memories, or the same in another order, by their names."""
    wanted = [memory.name for memory in gate.memories]
    if wanted != names:
        raise KnnlmError(
            f"the gate is for {_listed(wanted)}, but this run has {_listed(names)}; give the memories that it was "
            "trained with, in their order, or train one for these with knnlm gate"
        )


def check_fits(gate: Gate, memories: list[MemoryFacts], model: dict[str, Any]) -> None:
    """Refuse a gate that was trained with another model or other memories.

    Args:
        model: checkpoint_sha256 and dictionary_sha256 of this run
    """
    for fact, what in (("dictionary_sha256", "dictionary"), ("checkpoint_sha256", "checkpoint")):
        if gate.facts.source.get(fact) not in (None, model.get(fact)):
            raise KnnlmError(f"the gate was trained with another {what}; train one for this with knnlm gate")
    check_names(gate, [memory.name for memory in memories])
    for ours, theirs in zip(memories, gate.memories):
        for name in IDENTITY:
            if ours.identity.get(name) != theirs.identity.get(name):
                raise KnnlmError(
                    f"the gate was trained with another {ours.name} (its {name} differs); give the memories that it "
                    "was trained with, in their order, or train one for these with knnlm gate"
                )
        if ours.neighbors != theirs.neighbors:
            flag = "--knn-cache-size" if ours.is_cache else "--knn-k"
            wanted = f"{flag} {theirs.neighbors or 'all'}"
            raise KnnlmError(f"the gate was trained with {wanted}; give that, or train one for this with knnlm gate")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "no memory"
