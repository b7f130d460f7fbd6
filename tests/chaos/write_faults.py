"""Every write, fsync and rename of a run fails once: one sentence, old data whole, and the next run succeeds."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from workshop import Step, Workshop, check_same, run, snapshot

from fairseq_knnlm.storage import system

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
CALLS = ("write", "write_at", "fsync", "rename")


def fail_at(number: int, code: int) -> Callable[[], None]:
    """For a new process: let its n-th call (from 1) fail."""

    def prepare() -> None:
        calls = 0

        def wrap(call: Callable) -> Callable:
            def wrapped(*arguments):
                nonlocal calls
                calls += 1
                if calls == number:
                    raise OSError(code, os.strerror(code))
                return call(*arguments)

            return wrapped

        for name in CALLS:
            setattr(system, name, wrap(getattr(system, name)))

    return prepare


def count_calls(workshop: Workshop, step: Step) -> int:
    """How many such calls an undisturbed run makes: the first number that never comes."""
    low, high = 1, 2

    def fails(number: int) -> bool:
        return run(step.command(workshop.fresh(step)), fail_at(number, errno.EIO)).code != 0

    while fails(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return low


def run_write_faults(workshop: Workshop, every: int = 1) -> dict[str, int]:
    """For each step how many faults there were; ``every``: only each so many-th call of a run fails."""
    untouched = snapshot(workshop.store)
    counts = {}
    for step in workshop.steps:
        expected, _ = workshop.reference(step)
        total = count_calls(workshop, step)
        counts[step.name] = 0
        for number in range(1, total + 1, every):
            for turn, code in enumerate(ERRORS):
                folder = workshop.fresh(step)
                before = snapshot(folder)
                outcome = run(step.command(folder), fail_at(number, code))
                sentence = outcome.check_one_sentence()
                assert "cannot be written" in sentence, sentence
                _check_old_data(folder, before, expected)
                if turn == number % len(ERRORS):  # the next run does not see which error it was
                    workshop.finish(step, folder, expected)
                counts[step.name] += 1
    check_same(workshop.store, untouched)
    return counts


def _check_old_data(folder: Path, before: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """What was there before is there still, or has been replaced as a whole."""
    found = snapshot(folder)
    old = {name: data for name, data in before.items() if name in expected}
    if all(found.get(name) == data for name, data in old.items()):
        return
    assert all(found.get(name) == expected[name] for name in old), "old data was lost or is half replaced"
