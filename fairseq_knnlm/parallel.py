"""One thread per block of work, instead of all threads for each small operation of a block."""

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import torch

from .progress import progress

logger = logging.getLogger(__name__)

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
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    taking, numbered = Lock(), enumerate(jobs)

    def work() -> None:
        """Take one job after the other. A thread that hands them out would compete for Python's lock."""
        while True:
            with taking:
                number, job = next(numbered, (-1, ())) if not errors else (-1, ())
            if number < 0:
                return
            try:
                results[number] = function(*job)
            except BaseException as error:
                errors[number] = error
            if bar is not None:
                with taking:
                    bar.update(1)

    with (
        one_thread_per_operation as threads,
        progress(name, count) if name else nullcontext() as bar,
        ThreadPoolExecutor(threads, initializer=_use_one_thread) as pool,
    ):
        workers = [pool.submit(work) for _ in range(threads)]
        try:
            for worker in workers:
                worker.result()
        except BaseException as error:  # of making jobs, or from the keyboard: nobody takes another job
            errors.setdefault(len(results), error)
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in sorted(results)]


class Unlocked:
    """A function of tensors that runs without Python's lock from its beginning to its end.

    Python gives its lock away and takes it back at every operation of torch, and with several threads each time may
    mean to wait until another thread wakes up: for blocks of a millisecond that is nearly half of the time. So torch
    compiles the function as a whole (TorchScript). Where it cannot, and on other devices, the function itself is
    called; it does the same operations.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = self._compiled = function
        try:
            self._compiled = torch.jit.script(function)
        except Exception as error:  # of any kind: no source code, a Python or torch that does not know it, ...
            logger.debug(f"{function.__name__} runs operation by operation: {error}")

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        return (self._compiled if first.device.type == "cpu" else self._function)(first, *others)


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


one_thread_per_operation = _OneThreadPerOperation()


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
