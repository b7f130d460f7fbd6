"""What a gate is trained on: of each token of a save what LM and memories say of the target, and what they know before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory.features import PROFILE, Features, mass_name
from ..mixture.gate import MASS, GateMemory, absent, feature_matrix
from ..mixture.lm_features import LM_FEATURES
from .scores import SavedScores
from .settings import Settings, memory_scores, stack


@dataclass
class GateData:
    """The tokens of a save at fixed settings."""

    log_probs: Tensor  # (n, 1 + memories) double, of the target
    features: Tensor  # (n, names) double
    missing: Tensor  # (n, memories) bool: the memory has found nothing
    names: list[str]

    def __len__(self) -> int:
        return len(self.log_probs)

    def rows(self, chosen: Tensor) -> "GateData":
        return GateData(self.log_probs[chosen], self.features[chosen], self.missing[chosen], self.names)

    def loss(self, log_weights: Tensor) -> Tensor:
        """Mean loss of the mixture with these weights of each token, (n, 1 + memories)."""
        return -(log_weights + self.log_probs).logsumexp(dim=1).mean()


def gate_memories(saved: SavedScores, settings: Settings) -> list[GateMemory]:
    """The memories of a run at the chosen settings."""
    members = []
    for number, memory in enumerate(saved.run.memories):
        limit, sharpness = saved_knobs(saved, settings, number)
        members.append(GateMemory(memory.name, memory.identity, limit, sharpness, settings.weights[number]))
    return members


def saved_knobs(saved: SavedScores, settings: Settings, number: int) -> tuple[int | None, float]:
    """How many neighbours of a memory, and its sharpness; where some temperatures are saved, exactly one of them."""
    memory = saved.run.memories[number]
    if memory.is_head:
        return None, memory.sharpness
    if memory.is_cache:
        return settings.cache_size, settings.theta
    if memory.neighbors is not None:
        return min(settings.k or memory.neighbors, memory.neighbors), 1 / settings.temperatures[number]
    return None, 1 / min(memory.saved_temperatures, key=lambda t: abs(t / settings.temperatures[number] - 1))


def load_data(saved: SavedScores, settings: Settings, names: list[str] | None = None) -> GateData:
    """What a gate is trained on, or reported on.

    Args:
        names: of the features; None: all that there are
    """
    members, lm = gate_memories(saved, settings), saved.lm_features
    found = [saved.features(member.name, member.neighbors, member.sharpness) for member in members]
    names = all_features(members, found) if names is None else names
    log_probs = torch.from_numpy(stack(saved, memory_scores(saved, settings))).T.contiguous()
    return GateData(log_probs, feature_matrix(names, members, lm, found), absent(found, len(lm)), names)


def all_features(members: list[GateMemory], found: list[Features]) -> list[str]:
    """The names of everything that a gate may look at."""
    names = [f"lm.{name}" for name in LM_FEATURES]
    for member, known in zip(members, found):
        profile = [factor for factor in PROFILE if mass_name(factor * member.sharpness) in known]
        names += [f"{member.name}.{MASS}{factor:g}" for factor in profile]
        names += [f"{member.name}.{name}" for name in known if not name.startswith("mass at")]
    return names
