"""Commands as children of the benchmark: what they printed, how long they took, how much memory they had."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What fairseq-eval-lm, the plugin and benchmarks.original print.
PATTERNS = {
    "tokens": r"Evaluated ([\d,]+) tokens",
    "tokens_per_second": r"\(([\d.]+) tokens/s\)",
    "perplexity": r"Loss \(base 2\): .*Perplexity: ([\d.]+)",
    "loss": r"Loss \(base 2\): ([\d.]+)",
    "base_perplexity": r"base LM loss .*?, perplexity ([\d.]+)",
    "oracle": r"oracle perplexity ([\d.]+)",
    "hit_rate": r"hit rate ([\d.]+)",
    "effective_neighbors": r"([\d.]+) effective neighbours",
    "entries": r"complete(?: already)?: ([\d,]+) entries",
    "model": r"\bmodel ([\d.]+)s",
    "search": r"\bsearch ([\d.]+)s",
    "rescoring": r"\brescoring ([\d.]+)s",
    "mixing": r"\bmixing ([\d.]+)s",
}


def warm(*paths: Path) -> None:
    """Read files, so that they are in the system's memory when time counts. (A disk that is not warm is what counts
    otherwise.)
    """
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


REPOSITORY = Path(__file__).resolve().parent.parent
TASK = ["--user-dir", REPOSITORY / "fairseq_knnlm", "--task", "knn_language_modeling"]


def eval_lm_command(
    data: object, path: object, *flags: object, tokens_per_sample: object = 256, context_window: object = 128,
    stock: bool = False,
) -> list[object]:  # fmt: skip
    """The command that scores a split or dumps it: fairseq-eval-lm, as it comes or with our task."""
    return [
        "fairseq-eval-lm", data, "--path", path, "--tokens-per-sample", tokens_per_sample,
        "--context-window", context_window, "--max-tokens", 4096, "--no-progress-bar", *([] if stock else TASK), *flags,
    ]  # fmt: skip


def run(*command: object) -> dict:
    """Run a command to its end: the numbers it printed, its seconds, and its peak memory in bytes.

    Keys are those of PATTERNS, "seconds", "peak_memory" and "command"; "output", everything that it printed, and
    "stdout", what it printed there.
    """
    words = [str(word) for word in command]
    print("$ " + " ".join(words), file=sys.stderr, flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as logged:
        child = subprocess.Popen(words, stdout=printed, stderr=logged)
        peak = 0
        while child.poll() is None:
            peak = max(peak, _peak_memory(child.pid))
            time.sleep(0.2)
        printed.seek(0)
        logged.seek(0)
        stdout, stderr = printed.read(), logged.read()
    if child.returncode:
        sys.exit(f"failed: {' '.join(words)}\n{stdout[-2000:]}\n{stderr[-2000:]}")
    output = stdout + stderr
    return {
        **parse_numbers(output),
        "seconds": time.perf_counter() - started,
        "peak_memory": peak,
        "command": " ".join(words),
        "output": output,
        "stdout": stdout,
    }


def parse_numbers(output: str) -> dict[str, float]:
    """The numbers of PATTERNS that a command printed."""
    found = {name: re.search(pattern, output) for name, pattern in PATTERNS.items()}
    return {name: float(match[1].replace(",", "")) for name, match in found.items() if match}


def _peak_memory(pid: int) -> int:
    """Of a running process, in bytes. (What wait4 tells counts the memory of the parent that it was forked from.)"""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0)
    except FileNotFoundError:  # it has just ended
        return 0
