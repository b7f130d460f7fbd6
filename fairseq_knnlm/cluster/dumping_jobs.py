"""A dump by the nodes of a cluster: each job is the ordinary ``fairseq-eval-lm --knn-dump`` of one part."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..datastore import Manifest
from ..datastore.manifest import MANIFEST
from ..errors import KnnlmError
from ..progress import progress
from .jobs import finished_jobs, job_processors
from .nodes import Node

JOBS_PER_NODE = 4  # so that a fast node takes more of them, and a lost one loses little
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
TAIL = 400  # characters of what a failed command said
SECONDS_BETWEEN_LOOKS = 1.0


def dump_folder(arguments: list[str]) -> Path:
    """The folder of ``--knn-dump`` among the arguments of fairseq-eval-lm, after refusing what a job sets itself."""
    for flag in ("--num-shards", "--shard-id"):
        if any(word.split("=")[0] == flag for word in arguments):
            raise KnnlmError(f"{flag} is what knnlm cluster dump itself sets; leave it out")
    for place, word in enumerate(arguments):
        if word == "--knn-dump" and place + 1 < len(arguments):
            return Path(arguments[place + 1])
        if word.startswith("--knn-dump="):
            return Path(word.partition("=")[2])
    raise KnnlmError("there is no --knn-dump DIR behind the --; give all arguments of fairseq-eval-lm there")


def run_part(arguments: list[str], parts: int, part: int, threads: int, folder: str) -> int:
    """Dump one part on this node; 1."""
    package = Path(__file__).resolve().parent.parent
    command = [
        sys.executable, "-m", "fairseq_cli.eval_lm", *arguments, "--user-dir", str(package),
        "--task", "knn_language_modeling", "--num-shards", str(parts), "--shard-id", str(part), "--no-progress-bar",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    # A node that is lost takes its commands along, or two of them would dump the same part.
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, preexec_fn=_die_along)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["no message"]
        sentence = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1][-TAIL:])
        raise KnnlmError(f"part {part} of {parts}: {sentence.removeprefix('error: ')}")
    return 1


def _die_along() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def dump(ray: Any, nodes: list[Node], arguments: list[str], parts: int | None = None) -> Manifest:
    """Dump with all nodes; what was dumped.

    Args:
        arguments: of fairseq-eval-lm
        parts: how many jobs; None: some for every node
    """
    folder = dump_folder(arguments)
    if parts is not None and parts < 1:
        raise KnnlmError(f"--jobs must be 1 or more, not {parts}")
    parts = parts or JOBS_PER_NODE * len(nodes)
    threads = job_processors(nodes)
    options = {"num_gpus": 1} if all(node.gpus for node in nodes) else {"num_cpus": threads}
    jobs = [(arguments, parts, part, threads, os.getcwd()) for part in range(parts)]
    with ExitStack() as stack:
        bar, seen = None, 0
        for _ in finished_jobs(ray, run_part, jobs, options, SECONDS_BETWEEN_LOOKS):
            # The first job writes the manifest, which says how much there is to do.
            if bar is None and (folder / MANIFEST).exists():
                bar = stack.enter_context(progress("dumping", Manifest.load(folder).entries, " entries"))
            if bar is not None:
                now = entries_done(folder)
                bar.update(now - seen)
                seen = now
    manifest = Manifest.load(folder)
    if not manifest.complete:
        raise KnnlmError(
            f"{folder} is incomplete after all parts were dumped, so some nodes wrote elsewhere; use a folder that all "
            "nodes see, and run the same command again"
        )
    return manifest


def entries_done(folder: Path) -> int:
    """In shards that are whole."""
    shards = Manifest.load(folder).shards
    return sum(shard.rows for shard in shards if shard.keys_sha256 or (folder / shard.receipt_name).exists())
