"""Signs of life: a bar on a terminal, a plain line every half minute elsewhere. Everything long reports here."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_BARS = 0.5
WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {elapsed} so far"
FORMAT = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
Item = TypeVar("Item")


class Style:
    """How progress is shown in this process: "auto" (a bar on a terminal, lines elsewhere), "lines", or "none"."""

    chosen = "auto"

    @classmethod
    def is_bar(cls) -> bool:
        return cls.chosen == "auto" and sys.stderr.isatty()


class progress:  # used like a function: with progress("adding", entries, " keys") as bar
    """Counts things that are done, from any thread; it ends by itself when all of them are.

    In a log file a bar would be thousands of characters that nobody can read. A thread tells how far it is, so that
    there is a sign of life even while one step takes long.
    """

    _open: list["progress"] = []  # those that have not ended, the innermost last

    def __init__(self, name: str, total: int, unit: str = "", done: int = 0):
        self._name, self._total, self._unit, self._first = name, total, unit, done
        self._done, self._started = done, time.monotonic()
        self._told = done
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._bar: tqdm | None = None
        if Style.is_bar():
            self._bar = tqdm(
                desc=name, total=total or None, initial=done, unit=unit, unit_scale=True, leave=False,
                **_size(), bar_format=FORMAT if total else WITHOUT_TOTAL,
            )  # fmt: skip
        progress._open.append(self)
        if Style.chosen != "none":
            threading.Thread(target=self._tell_now_and_then, daemon=True).start()

    def update(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(count)
            if self._total and self._done >= self._total:
                self.close()

    def line(self) -> str:
        """How far it is, in words."""
        seconds = time.monotonic() - self._started
        per_second = (self._done - self._first) / seconds if seconds else 0.0
        if not self._total:
            counted = f"{self._done:,}{self._unit}, " if self._done else ""
            return f"{self._name}: {counted}{human_seconds(seconds)} so far"
        parts = [f"{self._name}: {self._done:,} of {self._total:,}{self._unit} ({self._done / self._total:.0%})"]
        if per_second:
            left = max(0, self._total - self._done) / per_second
            parts += [f"{human_rate(per_second)}", f"{human_seconds(left)} left"]
        else:
            parts.append(f"{human_seconds(seconds)} so far")
        return ", ".join(parts)

    def _tell_now_and_then(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES if self._bar is None else SECONDS_BETWEEN_BARS):
            with self._lock:
                if self._ended.is_set():
                    return
                if self._bar is not None:
                    self._bar.refresh()
                elif self._told != self._done or self is progress._open[-1]:  # else one inside of it tells
                    self._told = self._done
                    logger.info(self.line())

    def __enter__(self) -> "progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            progress._open.remove(self)
            if self._bar is not None:
                self._bar.close()


def _size() -> dict[str, Any]:
    """That of the terminal, also when it changes; some terminals do not know, and tqdm would draw nothing."""
    try:
        known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        known = False
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 20}


def each(items: Iterable[Item], name: str, total: int, unit: str = "") -> Iterator[Item]:
    """The items; each counts as done when the next one is asked for."""
    with progress(name, total, unit) as bar:
        for item in items:
            yield item
            bar.update(1)


def say(text: str, file: TextIO) -> None:
    """Print a line where a bar may be."""
    tqdm.write(text, file=file)
    file.flush()


def human_rate(per_second: float) -> str:
    """A speed that a person reads at a glance."""
    if per_second >= 1:
        return f"{per_second:,.0f} per second"
    return f"{60 * per_second:.1f} per minute" if per_second >= 1 / 60 else f"{3600 * per_second:.1f} per hour"


def human_seconds(seconds: float) -> str:
    """A duration that a person reads at a glance."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
