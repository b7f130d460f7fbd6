"""Training that survives its process: everything the next step depends on, in the folder ``HEAD.partial``.

    HEAD.partial/progress.json       the step, the best validation, which files belong to it, what is being trained
    HEAD.partial/STEP.NAME.npy       values and moments of what is trained, after so many steps
    HEAD.partial/best.STEP.NAME.npy  the values that were best in validation
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import KnnlmError
from ..storage import file_sha256, make_folder, remove_stale_files, write_array, write_record
from ..storage.records import read_record

if TYPE_CHECKING:
    from .learning import Learning

PROGRESS = "progress.json"


class LearningState:
    """Where a training is, on disk."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        """identity: what must be the same to go on"""
        self._folder, self._identity = folder, identity
        self._best: float | None = None
        self._best_step, self._worse = 0, 0
        self._files: dict[str, str] = {}

    @property
    def best_step(self) -> int | None:
        """After which validation was best; None: there was none."""
        return None if self._best is None else self._best_step

    def is_over(self, patience: int) -> bool:
        """Whether so many validations in a row were no better than the best."""
        return self._worse >= patience

    def restore(self, learning: "Learning") -> int:
        """Bring a training to where it was; the step to go on with."""
        make_folder(self._folder)
        remove_stale_files(self._folder)
        path = self._folder / PROGRESS
        if not path.exists():
            return 0
        remedy = f"delete {self._folder} and start again"
        found = read_record(path, remedy)
        if found.get("identity") != self._identity:
            raise KnnlmError(
                f"{self._folder} holds another training that was not finished; give the same flags to finish it, "
                "choose another -o, or delete it"
            )
        try:
            self._files = dict(found["files"])
            for name, adam in learning.adams.items():
                for part, tensor in adam.state().items():
                    tensor.copy_(self._read(f"{found['step']}.{name}.{part}", remedy))
            learning.results = list(found["results"])
            self._best, self._best_step, self._worse = found["best"], found["best_step"], found["worse"]
            return int(found["step"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise KnnlmError(f"{path} is damaged; {remedy}") from error

    def keep(self, learning: "Learning", step: int, valid: float | None) -> None:
        """Note a step and its validation loss."""
        is_best = valid is not None and (self._best is None or valid < self._best)
        if is_best:
            self._best, self._best_step, self._worse = valid, step, 0
        elif valid is not None:
            self._worse += 1
        files = {name: sha256 for name, sha256 in self._files.items() if name.startswith("best.") and not is_best}
        for name, adam in learning.adams.items():
            for part, tensor in adam.state().items():
                files[f"{step}.{name}.{part}"] = self._write(f"{step}.{name}.{part}", tensor)
            if is_best:
                files[f"best.{step}.{name}"] = self._write(f"best.{step}.{name}", adam.values)
        content = {
            "identity": self._identity, "step": step, "best": self._best, "best_step": self._best_step,
            "worse": self._worse, "results": learning.results, "files": files,
        }  # fmt: skip
        write_record(self._folder / PROGRESS, content)
        for name in set(self._files) - set(files):
            (self._folder / f"{name}.npy").unlink(missing_ok=True)
        self._files = files

    def take_best(self, learning: "Learning") -> None:
        """Give a head the values that were best in validation, if there was one."""
        if self._best is None:
            return
        for name, adam in learning.adams.items():
            adam.values.copy_(self._read(f"best.{self._best_step}.{name}", f"delete {self._folder} and start again"))

    def _write(self, name: str, tensor: torch.Tensor) -> str:
        return write_array(self._folder / f"{name}.npy", tensor.detach().numpy())

    def _read(self, name: str, remedy: str) -> torch.Tensor:
        path = self._folder / f"{name}.npy"
        if not path.exists() or file_sha256(path) != self._files[name]:
            raise KnnlmError(f"{path} is missing or damaged; {remedy}")
        return torch.from_numpy(np.load(path))
