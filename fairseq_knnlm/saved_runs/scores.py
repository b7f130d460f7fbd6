"""Log-probabilities of a saved run's tokens at any k, temperature and theta."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import KnnlmError
from ..memory import MemoryFacts
from ..memory.features import NEAREST, PROFILE, Features, gap_features
from .format import SavePart, open_save

ROWS_AT_ONCE = 4096


@dataclass
class SavedMemoryScores:
    """What one memory says of the n tokens."""

    log_probs: np.ndarray  # (n,) -inf where the token was not retrieved
    hits: np.ndarray  # (n,) bool: it was
    entropy: np.ndarray | None  # (n,) of the neighbours' shares, in nats; None where they are not saved (k = all)


class SavedScores:
    """The tokens of a save (all of them, or every so many-th), ready to be scored with other settings."""

    def __init__(self, parts: list[SavePart], every: int = 1, without: tuple[str, ...] = ()):
        """
        Args:
            without: memories to leave out of the mixture
        """
        self.parts, self.every, self.without = parts, every, without
        self.run = replace(
            parts[0].run, memories=[memory for memory in parts[0].run.memories if memory.name not in without]
        )
        self.memories = {memory.name: memory for memory in self.run.memories}
        self.lm = np.concatenate([part.arrays["lm"][::every] for part in parts]).astype(np.float64)
        self.tokens = np.concatenate([part.arrays["tokens"][::every] for part in parts])

    @classmethod
    def open(cls, folders: list[str] | list[Path], without: tuple[str, ...] = ()) -> "SavedScores":
        parts = open_save(folders)
        names = [memory.name for memory in parts[0].run.memories]
        for name in without:
            if name not in names:
                raise KnnlmError(f"there is no memory {name} in {folders[0]} to leave out; it has {', '.join(names)}")
        return cls(parts, without=without)

    def __len__(self) -> int:
        return len(self.lm)

    def sample(self, tokens: int) -> "SavedScores":
        """About this many of the tokens, evenly spread."""
        every = max(1, len(self) // tokens)
        return self if every == 1 else SavedScores(self.parts, self.every * every, self.without)

    @property
    def words(self) -> float | None:
        """Of the text, where its data tells."""
        counts = [part.run.words for part in self.parts]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def knn_memories(self) -> list[MemoryFacts]:
        """The datastores, which come first."""
        return [memory for memory in self.run.memories if not (memory.is_cache or memory.is_head)]

    @property
    def heads(self) -> list[MemoryFacts]:
        """The learned heads, which come after the datastores."""
        return [memory for memory in self.run.memories if memory.is_head]

    @property
    def cache(self) -> MemoryFacts | None:
        return self.memories.get("cache")

    @property
    def saved_cache(self) -> MemoryFacts:
        """The cache of a run that must have one."""
        if self.cache is None:
            raise KnnlmError("no cache was saved; score again with --knn-cache-size --knn-save")
        return self.cache

    def scores(self, name: str, k: int | None, sharpness: float, with_entropy: bool = False) -> SavedMemoryScores:
        """One memory with its k first neighbours (None: all that are saved) and a sharpness (1/T, or theta)."""
        if self.memories[name].neighbors is None:
            column = self._temperature_column(name, 1 / sharpness)
            saved = np.concatenate([part.arrays[f"{name}.log_probs"][:: self.every, column] for part in self.parts])
            return SavedMemoryScores(saved.astype(np.float64), np.isfinite(saved), None)
        results = []
        for gaps, matches, log_weights in self._blocks(name, k):
            gaps = gaps - gaps.min(dim=1, keepdim=True).values.nan_to_num(posinf=0.0)
            weights = _weights(gaps, sharpness, log_weights)
            total = weights.sum(dim=1)
            log_probs = ((weights * matches).sum(dim=1) / total).log().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
            block = [log_probs, matches.any(dim=1)]
            if with_entropy:
                mean_gap = (weights * gaps.nan_to_num(posinf=0.0)).sum(dim=1) / total
                entropy = total.log() + sharpness * mean_gap
                if log_weights is not None:
                    entropy -= (weights * log_weights).sum(dim=1) / total
                block.append(entropy.nan_to_num(nan=0.0, neginf=0.0))
            results.append(block)
        columns = [torch.cat(column).numpy() for column in zip(*results)]
        entropies = columns[2].astype(np.float64) if with_entropy else None
        return SavedMemoryScores(columns[0].astype(np.float64), columns[1], entropies)

    @property
    def lm_features(self) -> Tensor:
        """What a gate may look at of the LM, (n, LM_FEATURES)."""
        for part in self.parts:
            if not part.run.features:
                raise KnnlmError(f"{part.folder} has nothing that a gate could look at; score again with this release")
        columns = [part.arrays["lm.features"][:: self.every] for part in self.parts]
        return torch.from_numpy(np.concatenate(columns))

    def features(self, name: str, k: int | None, sharpness: float) -> Features:
        """What a gate may look at of one memory, with its k first neighbours (None: all that are saved)."""
        memory = self.memories[name]
        if memory.features:
            saved = np.concatenate([part.arrays[f"{name}.features"][:: self.every] for part in self.parts])
            return dict(zip(memory.features, torch.from_numpy(saved).unbind(dim=1)))
        if memory.neighbors is None:  # a memory without neighbours, and without features
            return {}
        nearest, profiles = [self.largest(name)], []
        sharpnesses = [sharpness * factor for factor in PROFILE]
        for gaps, _, log_weights in self._blocks(name, k):
            least = gaps.amin(dim=1)  # of the first k of a cache's positions, another than of all
            gaps = gaps - least.nan_to_num(posinf=0.0)[:, None]
            profiles.append(gap_features(gaps, sharpnesses, log_weights))
            nearest.append(least)
        features = {feature: torch.cat([profile[feature] for profile in profiles]) for feature in profiles[0]}
        return {NEAREST: nearest[0] - torch.cat(nearest[1:]), **features}

    def largest(self, name: str) -> Tensor:
        """The largest similarity of each token's neighbours, (n,)."""
        parts = [part.arrays[f"{name}.largest"][:: self.every] for part in self.parts]
        return torch.from_numpy(np.concatenate(parts)).nan_to_num(neginf=0.0)

    def expected_shares(self, name: str) -> np.ndarray:
        """Log of the share of the mass that each list was expected to hold, (n, lists) float32."""
        parts = [part.arrays[f"{name}.expected"][:: self.every] for part in self.parts]
        return np.concatenate(parts).astype(np.float32)

    def ranked(self, name: str) -> np.ndarray:
        """Log p of the tokens with the nearest 1, 2, 4, 8, ... lists, (n, ranks)."""
        return np.concatenate([part.arrays[f"{name}.ranked"][:: self.every] for part in self.parts]).astype(np.float64)

    def _temperature_column(self, name: str, temperature: float) -> int:
        saved = self.memories[name].saved_temperatures
        nearest = min(range(len(saved)), key=lambda column: abs(saved[column] - temperature))
        if abs(saved[nearest] - temperature) > 1e-3 * temperature:  # flags are printed with four digits
            raise KnnlmError(
                f"with --knn-k all the temperatures {', '.join(f'{t:g}' for t in sorted(saved))} were saved, not "
                f"{temperature:g}; choose one of them, or score again with --knn-temperature {temperature:g} --knn-save"
            )
        return nearest

    def log_probs_for_all_k(self, name: str, ks: list[int], sharpness: float) -> np.ndarray:
        """Log-probabilities with the first k neighbours, for several k at once: (len(ks), n)."""
        columns = torch.tensor(ks) - 1
        results = []
        for gaps, matches, log_weights in self._blocks(name, max(ks)):
            weights = _weights(gaps, sharpness, log_weights)
            total = weights.cumsum(dim=1)[:, columns]
            of_target = weights.mul_(matches).cumsum(dim=1)[:, columns]
            results.append((of_target / total).log().nan_to_num(nan=-torch.inf, neginf=-torch.inf))
        return torch.cat(results).T.double().numpy()

    def typical_gap(self, name: str) -> float:
        """The median of how much less similar a neighbour is than the best one: the scale of temperatures."""
        gaps, _, _ = next(self._blocks(name, None))
        gaps = gaps[gaps.isfinite() & (gaps > 0)]
        return float(gaps.median()) if len(gaps) else 1.0

    def _blocks(self, name: str, k: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Gaps (rows, k) float32, matches (rows, k), log of the entries' weights (rows, k), some rows at a time."""
        for part in self.parts:
            for start in range(0, part.run.tokens, ROWS_AT_ONCE * self.every):
                rows = slice(start, start + ROWS_AT_ONCE * self.every, self.every)
                gaps = torch.from_numpy(part.arrays[f"{name}.gaps"][rows, :k].astype(np.float32))
                exponents = torch.from_numpy(part.arrays[f"{name}.exponents"][rows].astype(np.int32))
                gaps = torch.ldexp(gaps, exponents[:, None]) if exponents.any() else gaps
                packed = part.arrays[f"{name}.matches"][rows]
                matches = np.unpackbits(packed, axis=1, count=k or self.memories[name].neighbors)
                own = None
                if self.memories[name].weighted:
                    own = torch.from_numpy(np.array(part.arrays[f"{name}.log_weights"][rows, :k]))
                yield gaps, torch.from_numpy(matches).bool(), own


def _weights(gaps: Tensor, sharpness: float, log_weights: Tensor | None = None) -> Tensor:
    """exp(-sharpness * gap), times the weight: (n, k) -> (n, k); an infinite gap is an absent neighbour."""
    if log_weights is None:
        return gaps.isfinite().float() if sharpness == 0 else (gaps * -sharpness).exp_()
    return gaps.isfinite() * (gaps.nan_to_num(posinf=0.0) * -sharpness + log_weights).exp_()
