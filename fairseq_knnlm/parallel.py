"""One thread per block of work, instead of all threads for each small operation of a block."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import torch

from .progress import progress

JOBS_AHEAD = 8  # that wait for each thread: jobs may be made as they are needed, and hold memory
Item = TypeVar("Item")


def for_each(
    function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], name: str | None = None, total: int | None = None
) -> list:
    """The results of function(*job), in order, as many at a time as torch has threads; the first error is raised.

    Args:
        name: what the progress bar calls it; None: no bar
        total: how many jobs there are, where ``jobs`` does not tell

    Torch would split every operation over all threads, and a block is some twenty operations of a millisecond or less:
    waiting for each other would take longer than the work.
    """
    if isinstance(jobs, list) and len(jobs) == 1 and name is None:  # torch's own threads are the only ones of use
        return [function(*jobs[0])]
    count = len(jobs) if isinstance(jobs, list) else total or 0
    results: list[Any] = []
    with _one_thread_per_operation as threads, progress(name, count) if name else nullcontext() as bar:
        pool = ThreadPoolExecutor(threads, initializer=_use_one_thread)
        waiting: deque[Future] = deque()

        def finish_first() -> None:
            results.append(waiting.popleft().result())
            if bar is not None:
                bar.update(1)

        try:
            for job in jobs:
                waiting.append(pool.submit(function, *job))
                if len(waiting) >= threads * JOBS_AHEAD:
                    finish_first()
            while waiting:
                finish_first()
            return results
        finally:
            pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    """Torch's operations in this thread of a pool are not split any further, whatever happens in other threads.

    Torch keeps a number for each thread, and one for threads to come, which a thread takes over at its first operation.
    Another caller who is done meanwhile sets the latter back, and a product of matrices by two threads differs in its
    last digits. So: ask first, for that is when a thread takes the number over, then set it.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


class _OneThreadPerOperation:
    """Sets torch to one thread for a while.

    A caller that comes while another is at work finds 1, and must not restore that: so the number that the first caller
    found counts for all of them.
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


def ahead(items: Iterable[Item], count: int) -> Iterator[Item]:
    """The items, made by a thread of their own, up to ``count`` of them before they are asked for."""
    queue: Queue[tuple[bool, Any]] = Queue(count)
    stopped = Event()

    def put(message: tuple[bool, Any]) -> None:
        while not stopped.is_set():
            try:
                return queue.put(message, timeout=0.1)
            except Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put((True, item))
                if stopped.is_set():
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    Thread(target=make, daemon=True).start()
    try:
        while (message := queue.get())[0]:
            yield message[1]
        if message[1] is not None:
            raise message[1]
    finally:
        stopped.set()
