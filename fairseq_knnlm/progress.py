"""Signs of life: a bar on a terminal, a plain line now and then elsewhere."""

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30


class progress:  # used like a function: with progress("adding", entries, " keys") as bar
    """Counts things that are done. In a log file a bar would be thousands of characters that nobody can read."""

    def __init__(self, name: str, total: int, unit: str = "", done: int = 0):
        self._name, self._total, self._unit, self._first = name, total, unit, done
        self._done, self._started = done, time.monotonic()
        self._told = self._started
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(desc=name, total=total, initial=done, unit=unit, unit_scale=True, leave=False)

    def update(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif (now := time.monotonic()) - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            per_second = (self._done - self._first) / (now - self._started)
            left = (self._total - self._done) / per_second if per_second else 0.0
            logger.info(
                f"{self._name}: {self._done:,} of {self._total:,}{self._unit}, {per_second:,.0f} per second, "
                f"{human_seconds(left)} left"
            )

    def __enter__(self) -> "progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def human_seconds(seconds: float) -> str:
    """A duration that a person reads at a glance."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
