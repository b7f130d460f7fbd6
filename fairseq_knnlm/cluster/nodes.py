"""The nodes of a cluster as the driver sees them, and whether they can serve a datastore together."""

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import KnnlmError
from .connection import describe
from .node_facts import own_facts

RESOURCE = "knnlm"  # ray start --resources '{"knnlm": 2}': two actors on this node; others then have none
SECONDS_TO_PROBE = 120


@dataclass
class Node:
    """One node: what Ray says of it, and what it says of itself."""

    id: str
    address: str
    processors: float  # as many as Ray was told
    gpus: int
    actors_wanted: int | None = None  # by its resource "knnlm"
    facts: dict[str, Any] = field(default_factory=dict)  # see ``own_facts``
    machine_share: int = 1  # how many nodes are on the same machine and share its memory

    @property
    def name(self) -> str:
        return f"{self.facts.get('host', '?')} ({self.address})"

    @property
    def memory(self) -> int:
        """Available, in bytes."""
        return int(self.facts.get("memory", 0)) // self.machine_share

    @property
    def sockets(self) -> list[list[int]]:
        return self.facts.get("sockets") or [[]]


def living_nodes(ray: Any) -> list[Node]:
    """The nodes that are up, in a fixed order."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            wanted = int(resources[RESOURCE]) if RESOURCE in resources else None
            processors, gpus = resources.get("CPU", 0.0), int(resources.get("GPU", 0))
            found.append(Node(node["NodeID"], node["NodeManagerAddress"], processors, gpus, wanted))
    return sorted(found, key=lambda node: (node.address, node.id))


def probe(ray: Any, nodes: list[Node], folder: Path | None = None, index: str | None = None) -> None:
    """Ask every node for its facts, and for its copy of a datastore."""
    path = None if folder is None else str(folder.resolve())
    asked = [(node, ask_node(ray, node, _make_question(), path, index)) for node in nodes]
    for node, answer in asked:
        try:
            node.facts = ray.get(answer, timeout=SECONDS_TO_PROBE)
        except ray.exceptions.RayError as error:
            raise KnnlmError(
                f"the node {node.address} does not answer ({describe(error)}); look at ray status, restart that node "
                "or take it out with ray stop"
            ) from error
    on_machine = Counter(node.facts.get("machine") for node in nodes)
    for node in nodes:
        node.machine_share = on_machine[node.facts.get("machine")]


def ask_node(ray: Any, node: Node, function: Callable, *arguments: Any) -> Any:
    """Run a function on one node; a reference to what it returns."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)


def _make_question() -> Callable:
    """A function that Ray sends as its source, not by its name: so a node without our package can answer, too."""
    module = own_facts.__module__

    def question(folder: str | None, index: str | None) -> dict:
        import importlib
        import platform
        import socket

        import ray

        facts = {"python": platform.python_version(), "ray": ray.__version__, "host": socket.gethostname()}
        try:
            ours = importlib.import_module(module)
        except ImportError as error:
            return {**facts, "package": None, "source": None, "missing": str(error)}
        return {**facts, **ours.own_facts(folder, index)}

    return question


def check_software(nodes: list[Node], ray_version: str) -> None:
    """Refuse nodes with other versions than this process has: their numbers, or their files, could differ."""
    own = {"python": platform.python_version(), "ray": ray_version, **own_facts()}
    for node in nodes:
        if node.facts.get("package") is None:
            raise KnnlmError(
                f"the node {node.name} cannot import fairseq_knnlm ({node.facts.get('missing')}); install the same "
                "release there, in the Python that runs ray"
            )
        for what in ("python", "ray", "package"):
            if node.facts[what] != own[what]:
                title = {"python": "Python", "ray": "Ray", "package": "fairseq-knnlm"}[what]
                raise KnnlmError(
                    f"the node {node.name} has {title} {node.facts[what]}, but here it is {own[what]}; install the "
                    "same version on every node"
                )
        if node.facts["source"] != own["source"]:
            raise KnnlmError(
                f"the node {node.name} has another fairseq-knnlm {own['package']} than this process (its source "
                "differs); install the same one on every node"
            )


def check_copies(nodes: list[Node], keys: str, index: dict[str, Any] | None) -> None:
    """Refuse nodes that do not see the datastore, or see another one."""
    for node in nodes:
        if problem := node.facts.get("problem"):
            raise KnnlmError(
                f"the node {node.name} cannot use the datastore: {problem}; put it on a shared file system, or copy it "
                "to the same place on every node (KNNLM_COPIES names another place)"
            )
        for what, here in (("keys", keys), ("index", index)):
            if here is not None and node.facts[what] != here:
                raise KnnlmError(
                    f"{node.facts['folder']} on the node {node.name} differs from the one here (the checksums of its "
                    f"{'index' if what == 'index' else 'keys'}); copy it there again"
                )
