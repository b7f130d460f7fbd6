"""Pages of results say nothing that is not in their JSON: each is what its script writes from it and the notes."""

import contextlib
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from commands import REPO

from benchmarks.results import PAGES, writer_of

RESULTS = REPO / "docs/results"
WRITERS = {
    "speed": ["benchmarks.__main__", "--report"],
    "scale": ["benchmarks.full_size", "--report"],
    "cluster": ["benchmarks.cluster", "--report"],
}  # take the JSON file itself
KNOWN = sorted(path.stem for path in RESULTS.glob("*.json"))


def test_every_page_has_its_json_and_its_script():
    pages = {path.stem for path in RESULTS.glob("*.md") if not path.name.endswith(".notes.md")}
    assert pages == set(KNOWN) and pages <= {*PAGES, *WRITERS}


@pytest.mark.parametrize("page", KNOWN)
def test_a_page_is_what_its_json_says(page, tmp_path, monkeypatch, capsys):
    for path in (*RESULTS.glob(f"{page}*"), RESULTS / "speed.json"):  # which the page scale quotes, too
        if path.suffix == ".json" or path.name.endswith(".notes.md"):
            shutil.copy(path, tmp_path)
    write(page, tmp_path, monkeypatch)
    assert (tmp_path / f"{page}.md").read_text() == (RESULTS / f"{page}.md").read_text(), "run make results"


def test_a_number_that_was_changed_by_hand_is_noticed(tmp_path, monkeypatch, capsys):
    shutil.copy(RESULTS / "spalm.json", tmp_path)
    shutil.copy(RESULTS / "spalm.notes.md", tmp_path)
    own = (RESULTS / "spalm.md").read_text()
    number = re.search(r"\| SPALM \| [\d,]+ \| \d+ \|  \| ([\d.]+) \|", own)
    assert number is not None
    write("spalm", tmp_path, monkeypatch)
    assert (tmp_path / "spalm.md").read_text() != own.replace(number[1], "1.23")


def write(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script of a page in this process."""
    if page in WRITERS:
        module, *flags = WRITERS[page]
        monkeypatch.setattr(sys, "argv", [module, *flags, str(folder / f"{page}.json")])
        with contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__")
        return
    script, *flags = map(str, writer_of(page, folder))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.syspath_prepend(str(Path(script).parent))
    with contextlib.suppress(SystemExit):  # what it did not write, a test misses
        runpy.run_path(script, run_name="__main__")
