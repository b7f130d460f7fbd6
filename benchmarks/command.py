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
    "hit_rate": r"hit rate ([\d.]+)",
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


def run(*command: object) -> dict:
    """Run a command to its end: the numbers it printed, its seconds, and its peak memory in bytes.

    Keys are those of PATTERNS, "seconds", "peak_memory" and "command"; and "output", everything that it printed.
    """
    words = [str(word) for word in command]
    print("$ " + " ".join(words), file=sys.stderr, flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as file:
        child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        peak = 0
        while child.poll() is None:
            peak = max(peak, _peak_memory(child.pid))
            time.sleep(0.2)
        file.seek(0)
        output = file.read()
    if child.returncode:
        sys.exit(f"failed: {' '.join(words)}\n{output[-2000:]}")
    found = {name: re.search(pattern, output) for name, pattern in PATTERNS.items()}
    numbers = {name: float(match[1].replace(",", "")) for name, match in found.items() if match}
    return {
        **numbers,
        "seconds": time.perf_counter() - started,
        "peak_memory": peak,
        "command": " ".join(words),
        "output": output,
    }


def _peak_memory(pid: int) -> int:
    """Of a running process, in bytes. (What wait4 tells counts the memory of the parent that it was forked from.)"""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM")), 0)
    except FileNotFoundError:  # it has just ended
        return 0
