"""Flipped, missing and foreign bytes: a sentence or a finding of knnlm verify, never a wrong number in silence."""

import re
import shutil
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workshop import Command, Workshop, run, succeed

FLIP, TRUNCATE, EMPTY, REPLACE = "flipped", "truncated", "emptied", "replaced"


def run_bad_bytes(workshop: Workshop, examples: int) -> dict[str, int]:
    """Damage files of a datastore, its index, a save and a table; how many damaged files of each kind of damage."""
    folder = workshop.folder / "sound"
    folder.mkdir()
    shutil.copytree(workshop.store, folder / "store")
    succeed(["knnlm", "subsample", workshop.store, "--fraction", 0.5, "-o", folder / "part"])
    succeed(workshop.score(folder / "store", "--knn-k", 8, "--knn-save", folder / "save"))
    succeed(["knnlm", "neighbors", "--datastore", folder / "store", "--queries", folder / "part", "--k", 2,
             "--index", "IVF16,SQfp16", "-o", folder / "table"])  # fmt: skip
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = ("store", "save", "table", "part")
    sound = {name: _numbers(succeed(_use(workshop, folder, name)).output) for name in names}
    counts = dict.fromkeys((FLIP, TRUNCATE, EMPTY, REPLACE), 0)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(
        st.sampled_from(files), st.sampled_from(list(counts)), st.floats(0, 1, exclude_max=True), st.integers(1, 255),
        st.sampled_from(files),
    )  # fmt: skip
    def damage(path: Path, kind: str, place: float, bits: int, other: Path) -> None:
        copy = workshop.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        target = copy / path.relative_to(folder)
        before = target.read_bytes()
        target.write_bytes(_damaged(before, kind, place, bits, other.read_bytes()))
        if target.read_bytes() == before:
            return
        counts[kind] += 1
        name = path.relative_to(folder).parts[0]
        found = run(["knnlm", "verify", copy / name])
        if found.code:
            assert "Traceback" not in found.output and found.sentences, found.output[-2000:]
        used = run(_use(workshop, copy, name))
        if used.code:
            used.check_one_sentence()
        elif found.code == 0:
            differ = sorted(set(_numbers(used.output)) ^ set(sound[name]))
            if differ:  # damage gives the same wrong numbers again; say what was seen, whatever it was
                print(f"{target} {kind} at {place}: {differ}", file=sys.stderr)
                shutil.rmtree(copy / "new-table", ignore_errors=True)
                again = _numbers(succeed(_use(workshop, copy, name)).output)
                assert set(again) == set(sound[name]), f"{target} {kind}: other numbers, not found by verify: {differ}"

    damage()
    return counts


def _damaged(data: bytes, kind: str, place: float, bits: int, other: bytes) -> bytes:
    at = int(place * len(data))
    if kind == FLIP:
        return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :] if data else data
    return {TRUNCATE: data[:at], EMPTY: b"", REPLACE: other}[kind]


def _use(workshop: Workshop, folder: Path, name: str) -> Command:
    """A command that reads what was damaged and prints numbers."""
    if name == "save":
        return ["knnlm", "tune", folder / "save"]
    if name == "table":
        return ["knnlm", "spalm", "neighbors", folder / "table", "--data", workshop.data, "--datastore",
                folder / "store", "--tokens", 20]  # fmt: skip
    if name == "part":
        return ["knnlm", "neighbors", "--datastore", folder / "part", "--queries", folder / "part", "--k", 2, "-o",
                folder / "new-table"]  # fmt: skip
    return workshop.score(folder / "store", "--knn-k", "all")


def _numbers(output: str) -> list[str]:
    """The results that a command prints; not how long it took."""
    lines = [line for line in output.splitlines() if re.search("Perplexity|mixture|valid|itself|neighbour|->", line)]
    return [re.sub(r"(model|search|mixing) [\d.]+s|\d+ s;.*|^\S+ \S+ \|", "", line) for line in lines]
