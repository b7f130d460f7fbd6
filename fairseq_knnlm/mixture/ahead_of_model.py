"""Searches on other machines while the model works on the next batches, with a bound on how many wait."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..data.context_blocks import own_positions
from ..memory import Memory, MemoryScores

IN_FLIGHT = 2  # searches at once; one more waits, and then the model does


class SearchesAhead:
    """The searches of those memories that search elsewhere: begun in order, and received in order."""

    def __init__(self, memories: list[Memory], keep: bool, receive: Callable[[int, MemoryScores], None]):
        """
        Args:
            keep: whether to return what a saved run needs
            receive: is given the number of a memory and the scores of its next tokens, by the thread that calls us
        """
        self.memories = {number: memory for number, memory in enumerate(memories) if memory.part_queries}
        self._keep, self._receive = keep, receive
        self._pools = {number: ThreadPoolExecutor(IN_FLIGHT) for number in self.memories}
        self._waiting: dict[int, deque[Future[list[MemoryScores]]]] = {number: deque() for number in self.memories}

    @property
    def part_queries(self) -> int:
        """How many queries to begin with at a time; 0: nobody searches elsewhere."""
        return min((memory.part_queries for memory in self.memories.values()), default=0)

    def begin(self, queries: list[list[Tensor]], targets: list[Tensor]) -> None:
        """Search for the queries of some batches; waits for the oldest search where too many are under way.

        Args:
            queries: of each batch those of every memory, (n, dim)
            targets: of each batch, (n,)
        """
        for number, memory in self.memories.items():
            if len(self._waiting[number]) > IN_FLIGHT:
                self._receive_first(number)
            own, wanted = torch.cat([batch[number] for batch in queries]), torch.cat(targets)
            self._waiting[number].append(self._pools[number].submit(self._search, memory, own, wanted))

    def _search(self, memory: Memory, queries: Tensor, targets: Tensor) -> list[MemoryScores]:
        return list(memory.scores_in_parts(queries, targets, self._keep))

    def finish(self) -> None:
        """Wait for all searches that are under way."""
        for number, waiting in self._waiting.items():
            while waiting:
                self._receive_first(number)

    def _receive_first(self, number: int) -> None:
        for part in self._waiting[number].popleft().result():
            self._receive(number, part)

    def __enter__(self) -> "SearchesAhead":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)


def parts_of(batches: list[dict], tokens: int, skip: int) -> Iterator[list[dict]]:
    """Consecutive batches that predict at least so many tokens each time, but for the last; all of them for 0."""
    part: list[dict] = []
    count = 0
    for batch in batches:
        part.append(batch)
        count += int(own_positions(batch, skip).sum()) if tokens else 0
        if tokens and count >= tokens:
            yield part
            part, count = [], 0
    if part:
        yield part
