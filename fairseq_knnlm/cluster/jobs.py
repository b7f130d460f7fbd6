"""Many jobs on the nodes of a cluster: some at a time, and those of a lost node again."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ..errors import KnnlmError
from .connection import describe
from .nodes import Node

MOST_RETRIES = 5  # of a job whose node or process was lost
JOBS_AHEAD = 2  # of every node


def job_processors(nodes: list[Node]) -> int:
    """How many processors a job takes, so that every node has one job at a time: those of the smallest node."""
    return max(1, int(min((node.processors for node in nodes if node.processors), default=1)))


def finished_jobs(
    ray: Any,
    function: Callable[..., int],
    jobs: list[tuple[Any, ...]],
    options: dict[str, Any],
    seconds: float | None = None,
) -> Iterator[list[int]]:
    """Run function(*job) for every job, anywhere in the cluster: what some of them returned, as they finish.

    Ray repeats a job whose node is lost on another one.

    Args:
        options: what a job takes (num_cpus, num_gpus)
        seconds: yield at least so often, then perhaps nothing
    """
    remote = ray.remote(function).options(max_retries=MOST_RETRIES, scheduling_strategy="SPREAD", **options)
    waiting = iter(jobs)
    running = [remote.remote(*job) for job in islice(waiting, JOBS_AHEAD * max(1, len(ray.nodes())))]
    while running:
        finished, running = ray.wait(running, timeout=seconds)
        running += [remote.remote(*job) for job in islice(waiting, len(finished))]
        yield list(results_of(ray, finished))


def results_of(ray: Any, finished: list) -> Iterator[Any]:
    """What jobs returned; one that failed is an error in one sentence."""
    for job in finished:
        try:
            yield ray.get(job)
        except ray.exceptions.RayTaskError as error:
            raise KnnlmError(f"a job failed on a node: {describe(error)}") from error
        except ray.exceptions.RayError as error:
            raise KnnlmError(
                f"a job was lost {MOST_RETRIES} times ({describe(error)}); look at ray status, and run the same "
                "command again: it continues"
            ) from error
