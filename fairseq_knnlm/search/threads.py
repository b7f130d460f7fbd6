"""One thread a block of work, instead of all threads for each small operation of a block."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tqdm import tqdm


def for_each(function: Callable[..., None], jobs: Iterable[tuple[Any, ...]], progress: str | None = None) -> None:
    """Call function(*job) for every job, as many at a time as torch has threads; the first error is raised.

    Args:
        progress: what a progress bar calls it; None: no bar (as where nobody sees it)

    Torch would split every operation over all threads, and a block is some twenty operations of a millisecond or less:
    waiting for each other would take longer than the work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # new threads take it over
    try:
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(function, *job) for job in jobs]
            for future in tqdm(futures, desc=progress, leave=False, disable=None if progress else True):
                future.result()
    finally:
        torch.set_num_threads(threads)
