"""Signs of life: plain lines off a terminal, a bar on one."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from fairseq_knnlm import progress as module
from fairseq_knnlm.progress import Style, each, human_rate, human_seconds, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it; nothing is told by itself."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_line_says_how_far_how_fast_and_how_long(clock):
    with progress("dumping", 10_000, " entries", done=1000) as bar:
        clock[0] += 30
        assert bar.line() == "dumping: 1,000 of 10,000 entries (10%), 30 s so far"
        bar.update(1500)
        assert bar.line() == "dumping: 2,500 of 10,000 entries (25%), 50 per second, 2 min left"
    with progress("tuning", 0) as bar:
        clock[0] += 200
        assert bar.line() == "tuning: 3 min so far"


def test_rates_and_durations():
    assert human_rate(1234.5) == "1,234 per second" and human_rate(0.1) == "6.0 per minute"
    assert human_rate(0.001) == "3.6 per hour"
    assert human_seconds(99) == "99 s" and human_seconds(600) == "10 min" and human_seconds(7200) == "2.0 h"


def told(caplog, wanted: int) -> list[str]:
    """Wait for so many lines of the thread that tells them."""
    waiting = threading.Event()
    for _ in range(1000):
        if len(caplog.messages) >= wanted:
            return caplog.messages
        waiting.wait(0.01)
    raise AssertionError(caplog.messages)


def test_lines_come_by_themselves(caplog, monkeypatch):
    """Even while one step takes long; those inside another bar tell alone, as long as nothing else happens."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.01)
    with caplog.at_level("INFO"), progress("outer", 5):
        with progress("inner", 3):
            told(caplog, 3)
            caplog.clear()
            assert all(line.startswith("inner: 0 of 3") for line in told(caplog, 3))
        caplog.clear()
        assert told(caplog, 1)[-1].startswith("outer: 0 of 5")


def test_a_bar_ends_when_all_is_done():
    before = list(progress._open)
    bar = progress("short", 2)
    bar.update(2)
    assert progress._open == before
    assert list(each("abc", "letters", 3)) == list("abc") and progress._open == before


def test_silence_is_a_choice(caplog, monkeypatch):
    monkeypatch.setattr(Style, "chosen", "none")
    before = threading.active_count()
    with progress("quiet", 3):
        assert threading.active_count() == before


def test_updates_come_from_any_thread():
    with progress("many", 100_000) as bar:
        threads = [threading.Thread(target=lambda: [bar.update() for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bar.line().startswith("many: 8,000 of")


SCRIPT = """
import logging, sys
from fairseq_knnlm.logs import log_plainly
from fairseq_knnlm.progress import progress
log_plainly()
with progress("dumping", 4, " entries") as bar:
    for step in range(4):
        logging.getLogger("fairseq_knnlm.test").info("step %d is done", step)
        bar.update()
"""


def test_off_a_terminal_there_is_no_carriage_return():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "\r" not in result.stderr and result.stderr.splitlines() == [f"step {n} is done" for n in range(4)]


def test_on_a_terminal_there_is_a_bar_and_lines_stay_whole():
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    while True:
        try:
            some = os.read(ours, 4096)
        except OSError:  # the child has closed its side
            break
        if not some:
            break
        shown += some
    os.close(ours)
    assert child.wait() == 0
    text = shown.decode()
    assert re.search(r"dumping: +\d+% \|.*\d of 4.00 entries.* left", text)
    for number in range(4):
        assert re.search(rf"(^|[\r\n]|\x1b\[\w)step {number} is done\r\n", text), text
