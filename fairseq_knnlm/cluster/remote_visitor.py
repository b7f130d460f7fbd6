"""The driver's side of an actor: asks it as ``ListSearch`` asks a visitor, and replaces it when it is lost."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import KnnlmError
from ..search.list_blocks import Lists
from ..search.masses import Masses, spread_masses
from ..search.visitor import Found, VisitedMasses
from .connection import NAMESPACE, describe
from .list_actor import Assignment, ListActor
from .nodes import Node, check_copies, check_software, living_nodes, probe
from .placement import Seat

logger = logging.getLogger(__name__)

TRIES = 5  # of one question, before a range of lists counts as lost
SECONDS_BETWEEN_TRIES = 2.0  # more after every try

FindNode = Callable[[Node], Node]  # from the node of an actor that was lost to the node of the next one


class Traffic:
    """Bytes that went out to actors and came back from them."""

    def __init__(self) -> None:
        self.sent = self.received = self.questions = 0
        self._lock = Lock()

    def add(self, sent: int, received: int) -> None:
        with self._lock:
            self.sent, self.received, self.questions = self.sent + sent, self.received + received, self.questions + 1


class RemoteVisitor:
    """A range of lists that an actor owns."""

    device = torch.device("cpu")  # where questions and answers are

    def __init__(self, ray: Any, task: Assignment, seat: Seat, lists: Lists, find_node: FindNode, traffic: Traffic):
        """
        Args:
            lists: their sizes are all that is asked for here
            find_node: the place of the next actor, when one is lost
        """
        self._ray, self._task, self._seat, self.lists = ray, task, seat, lists
        self._find_node, self._traffic = find_node, traffic
        self._lock = Lock()
        self.actor, self.opened = self._start()

    @property
    def node(self) -> Node:
        return self._seat.node

    # --- questions ----------------------------------------------------------------------------------------------------

    def masses(self, vectors: Tensor, targets: np.ndarray, near: np.ndarray, *options: Any) -> Masses:
        rows, own = self._own_visits(near)
        if not len(rows):
            return self._no_masses(len(near), *options)
        return spread_masses(self._ask("masses", vectors, rows, own, targets[rows], *options), rows, len(near))

    def _no_masses(self, count: int, temperatures: list[float], keep_mean: bool, *_: Any) -> Masses:
        none = np.empty((len(temperatures), 0))
        nothing = Masses(none, none, largest=np.empty(0))
        if keep_mean:
            nothing.sum_of_logs, nothing.lists = none, np.empty(0)
        return spread_masses(nothing, np.empty(0, np.int64), count)

    def nearest(self, vectors: Tensor, near: np.ndarray, k: int, max_samples: int) -> Iterator[Found]:
        rows, own = self._own_visits(near)
        sign = -1.0 if self._task.metric == "ip" else 1.0
        distances = np.full((len(near), k), sign * np.inf, np.float32)
        ids, right = np.full((len(near), k), -1, np.int64), np.ones(len(near), bool)
        if len(rows):
            found = self._ask("nearest", vectors, rows, own, k, max_samples)
            width = found[1].shape[1]
            distances[rows, :width], ids[rows, :width], right[rows] = found
        return iter([(distances, ids, right)])

    def nearest_plainly(self, vectors: Tensor, near: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        rows, own = self._own_visits(near)
        sign = -1.0 if self._task.metric == "ip" else 1.0
        distances = np.full((len(near), k), sign * np.inf, np.float32)
        ids = np.full((len(near), k), -1, np.int64)
        if len(rows):
            distances[rows], ids[rows] = self._ask("nearest_plainly", vectors, rows, own, k)
        return distances, ids

    def visited(self, vector: Tensor, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, own = self._own_visits(near)
        if not len(rows):
            return np.empty(0, np.float32), np.empty(0, np.int64)
        return self._ask("visited", vector, rows, own)

    def visited_masses(self, vector: Tensor, near: np.ndarray, scale: float) -> VisitedMasses:
        rows, own = self._own_visits(near)
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0), np.empty(0)
        return self._ask("visited_masses", vector, rows, own, scale)

    def _own_visits(self, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which queries visit a list of this actor, (r,), and these lists, (r, most of one query) int32, -1: none.

        Example with the lists 10 to 20 of an actor, for 3 queries and nprobe 3:

            14  3 11                       14 11
             2  5 27      rows 0, 2        18 -1
            40 18  7
        """
        own = (near >= self._task.first) & (near < self._task.stop)
        counts = own.sum(axis=1)
        rows = np.flatnonzero(counts)
        if not len(rows):
            return rows, np.empty((0, 0), np.int32)
        order = np.argsort(~own[rows], axis=1, kind="stable")[:, : int(counts.max())]
        mine = np.where(own[rows], near[rows], -1)
        return rows, np.take_along_axis(mine, order, axis=1).astype(np.int32)

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, vectors: Tensor, rows: np.ndarray, near: np.ndarray, *options: Any) -> Any:
        """The answer of the actor, or of its successors.

        The queries are put into Ray's store once; whoever answers in the end reads them from there.
        """
        own = vectors.numpy()[rows]
        question = self._ray.put((own, near))
        answer = self._insist(lambda actor: self._ray.get(actor.answer.remote(method, question, *options)))
        self._traffic.add(own.nbytes + near.nbytes + _bytes_of(options), _bytes_of(answer))
        return answer

    def ready(self) -> None:
        """Wait until the actor has opened its lists."""
        self._insist(lambda actor: None)

    def _insist(self, ask: Callable[[Any], Any]) -> Any:
        """ask(actor), and the same of its successors where it is lost."""
        errors = self._ray.exceptions
        problem = ""
        for attempt in range(TRIES):
            actor, opened = self.actor, self.opened
            try:
                self._ray.get(opened)
                return ask(actor)
            except errors.RayTaskError as error:
                raise KnnlmError(self._unserved(describe(error))) from error
            except errors.RayError as error:
                problem = describe(error)
                time.sleep(attempt * SECONDS_BETWEEN_TRIES)  # Ray notices a lost node some seconds later
                self._replace(actor)
        raise KnnlmError(self._unserved(f"{TRIES} actors were lost, the last one so: {problem}"))

    def _unserved(self, why: str) -> str:
        return (
            f"the lists {self._task.first:,} to {self._task.stop - 1:,} cannot be served by the node "
            f"{self._seat.node.name}, and without them every sum would be too small: {why}"
        )

    def _replace(self, lost: Any) -> None:
        """Start another actor in the place of one that was lost, unless another thread has done so."""
        with self._lock:
            if self.actor is not lost:
                return
            node = self._find_node(self._seat.node)
            logger.warning(
                f"the actor of the lists {self._task.first:,} to {self._task.stop - 1:,} on the node "
                f"{self._seat.node.name} was lost; another one starts on {node.name}"
            )
            if node.id != self._seat.node.id:  # whose GPUs have actors already
                self._seat = replace(self._seat, node=node, gpu=False)
                self._task = replace(self._task, processors=None, device="cpu", half=False)
            self.actor, self.opened = self._start()

    def _start(self) -> tuple[Any, Any]:
        """An actor on the node of the seat, and a reference that is there once it has opened its lists."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(self._seat.node.id, soft=False)
        name = actor_name(self._task, self._seat.node)
        options = {"num_cpus": 0, "num_gpus": int(self._seat.gpu), "scheduling_strategy": strategy, "name": name}
        actor = self._ray.remote(ListActor).options(namespace=NAMESPACE, **options).remote()
        return actor, actor.open.remote(self._task)

    def close(self) -> None:
        self._ray.kill(self.actor)


def actor_name(task: Assignment, node: Node) -> str:
    """Tells ``knnlm cluster status`` who is where."""
    return f"{node.id} lists {task.first}-{task.stop} of {Path(task.folder).name} {secrets.token_hex(4)}"


class NodeFinder:
    """Finds the node of an actor's successor: the same one, or any other that sees the datastore."""

    def __init__(self, ray: Any, folder: Path, keys: str, index: dict[str, Any]):
        self._ray, self._folder, self._keys, self._index = ray, folder, keys, index
        self._turn = 0

    def __call__(self, lost: Node) -> Node:
        nodes = living_nodes(self._ray)
        if any(node.id == lost.id for node in nodes):
            return lost
        usable: list[Node] = []
        problem = "no other node is up"
        for node in nodes:
            try:
                probe(self._ray, [node], self._folder, self._index["name"])
                check_software([node], self._ray.__version__)
                check_copies([node], self._keys, self._index)
                usable.append(node)
            except KnnlmError as error:
                problem = str(error)
        if not usable:
            raise KnnlmError(
                f"the node {lost.name} was lost, and no other one can serve its lists ({problem}); start it again, and "
                "run the same command again"
            )
        self._turn += 1
        return usable[self._turn % len(usable)]


def _bytes_of(things: Any) -> int:
    """Of the arrays in an answer or a question."""
    if isinstance(things, np.ndarray):
        return things.nbytes
    if isinstance(things, Masses):
        return sum(_bytes_of(getattr(things, field.name)) for field in fields(Masses))
    if isinstance(things, list | tuple):
        return sum(map(_bytes_of, things))
    return 8 if isinstance(things, int | float) else 0
