"""Steps of the comparison: each is a command that runs once, resumes after an interruption, and is on record.

A step has a log, which is appended to, and a mark when it is done. What is not done is run again by the same call:
fairseq-train continues from its last checkpoint, dumps and tables from their last shard.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
USER_DIR = REPOSITORY / "fairseq_knnlm"


class Steps:
    """Runs commands in WORK and keeps what they were and how long they took in WORK/steps.json."""

    def __init__(self, work: Path, jobs: int):
        self.work, self.jobs = work, jobs
        self.logs = work / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._record = work / "steps.json"
        self._lock = threading.Lock()
        self.known: dict[str, dict] = json.loads(self._record.read_text()) if self._record.exists() else {}

    def done(self, name: str) -> bool:
        return self.known.get(name, {}).get("done", False)

    def run(self, name: str, *command: object, seed: int | None = None) -> None:
        """Run a command unless it is done. Several at a time share the processors."""
        words = [str(word) for word in command]
        if self.done(name):
            print(f"[{name}] done before", flush=True)
            return
        print(f"[{name}] {' '.join(words)}", flush=True)
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        if words[0].startswith("fairseq-"):
            words[:1] = [sys.executable, "-m", "fairseq_cli." + words[0][len("fairseq-") :].replace("-", "_")]
        elif words[0] == "knnlm":
            words[:1] = [sys.executable, "-m", "fairseq_knnlm.cli"]
        started = time.time()
        with open(self.logs / f"{name}.log", "a") as log:
            code = subprocess.run(
                words, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
            ).returncode
        if code:
            end = self.text(name)[-1500:]
            sys.exit(f"error: the step {name} failed; {self.logs / name}.log says why, its end is:\n{end}")
        seconds = time.time() - started + self.known.get(name, {}).get("seconds", 0.0)
        self._keep(name, {"command": self._plain(command), "seed": seed, "seconds": round(seconds, 1), "done": True})
        print(f"[{name}] took {seconds:.0f} s", flush=True)

    def _plain(self, command: Iterable[object]) -> str:
        """A command without the paths of this machine."""
        return " ".join(map(str, command)).replace(f"{self.work}/", "WORK/").replace(f"{REPOSITORY}/", "")

    def _keep(self, name: str, facts: dict) -> None:
        with self._lock:
            self.known[name] = facts
            temporary = self._record.with_suffix(".part")
            temporary.write_text(json.dumps(self.known, indent=1) + "\n")
            temporary.replace(self._record)

    def call(self, name: str, function: Callable[[], object]) -> None:
        """A step that is a function, with what it did in words."""
        if not self.done(name):
            print(f"[{name}]", flush=True)
            function()
            self._keep(name, {"command": (function.__doc__ or "").strip(), "seed": None, "seconds": 0.0, "done": True})

    def forget(self, folder: Path) -> None:
        """Delete what can be made again and no later step needs."""
        shutil.rmtree(folder, ignore_errors=True)

    def together(self, jobs: list[Callable[[], None]]) -> None:
        """Run several chains of steps, so many at a time; all are tried before the first failure ends it."""
        with ThreadPoolExecutor(self.jobs) as pool:
            failures = [error for error in pool.map(_outcome, jobs) if error is not None]
        if failures:
            sys.exit(str(failures[0]))

    def text(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def find(self, name: str, pattern: str) -> str:
        found = re.findall(pattern, self.text(name))
        if not found:
            sys.exit(f"error: the log of {name} has no {pattern}; delete it from {self._record} and run again")
        return found[-1]

    def perplexity(self, name: str) -> float:
        """From the loss, which has more digits than the perplexity that fairseq-eval-lm prints."""
        return 2 ** float(self.find(name, r"Loss \(base 2\): ([\d.]+)"))

    def tuned(self, name: str) -> dict:
        return json.loads(self.find(name, r'\{"flags".*\}'))

    def curve(self, name: str) -> list[list[float]]:
        """[[updates, perplexity on valid], ...] of a training."""
        points = {}
        for line in re.findall(r'\{"epoch": .*"valid_loss".*\}', self.text(name)):
            facts = json.loads(line)
            points[int(facts["valid_num_updates"])] = 2 ** float(facts["valid_loss"])
        return [[updates, perplexity] for updates, perplexity in sorted(points.items())]

    def parameters(self, name: str) -> int:
        return int(self.find(name, r"num. shared model params: ([\d,]+)").replace(",", ""))


def _outcome(job: Callable[[], None]) -> SystemExit | None:
    try:
        job()
    except SystemExit as error:
        return error
    return None


def versions() -> dict[str, str]:
    names = ("fairseq-fixed", "torch", "faiss-cpu", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
