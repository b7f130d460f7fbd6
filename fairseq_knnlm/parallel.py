"""One thread per block of work, instead of all threads for each small operation of a block."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from tqdm import tqdm


def for_each(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], progress: str | None = None) -> list:
    """The results of function(*job), in order, as many at a time as torch has threads; the first error is raised.

    Args:
        progress: what a progress bar calls it; None: no bar (as where nobody sees it)

    Torch would split every operation over all threads, and a block is some twenty operations of a millisecond or less:
    waiting for each other would take longer than the work.
    """
    with _one_thread_per_operation as threads:
        pool = ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(function, *job) for job in jobs]
            return [future.result() for future in progress_bar(futures, progress)]
        finally:
            pool.shutdown(cancel_futures=True)


class _OneThreadPerOperation:
    """Sets torch to one thread for a while; threads that are started meanwhile take that over.

    Torch keeps the number for each thread, and one for threads to come. A caller that comes while another is at work
    finds 1, and must not restore that: so the number that the first caller found counts for all of them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._threads = 1

    def __enter__(self) -> int:
        """How many threads there are to use."""
        with self._lock:
            if self._users == 0:
                self._threads = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)
            return self._threads

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            torch.set_num_threads(self._threads)


_one_thread_per_operation = _OneThreadPerOperation()


def progress_bar(items: list, name: str | None) -> Iterable[Any]:
    """The items, with a progress bar of this name on a terminal; without a name there is none."""
    return tqdm(items, desc=name, leave=False, disable=None) if name else items
