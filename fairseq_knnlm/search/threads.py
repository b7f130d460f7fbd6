"""One thread a block of work, instead of all threads for each small operation of a block."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def for_each(function: Callable[..., None], jobs: Iterable[tuple[Any, ...]]) -> None:
    """Call function(*job) for every job, as many at a time as torch has threads; the first error is raised.

    Torch would split every operation over all threads, and a block is some twenty operations of a millisecond or less:
    waiting for each other would take longer than the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # new threads take it over
    try:
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(function, *job) for job in jobs]:
                future.result()
    finally:
        torch.set_num_threads(threads)
