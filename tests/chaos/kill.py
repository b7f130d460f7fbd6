"""SIGKILL at random moments: the same command then ends byte for byte as an undisturbed run."""

import random
import time

from workshop import Process, Workshop

KILLS_IN_A_ROW = 3


def run_kills(workshop: Workshop, kills: int, seed: int = 1) -> dict[str, int]:
    """At least ``kills`` killed processes, spread over the steps; how many of each step."""
    rng = random.Random(seed)
    per_step = -(-kills // len(workshop.steps))
    counts = {}
    for step in workshop.steps:
        expected, seconds = workshop.reference(step)
        counts[step.name] = 0
        while counts[step.name] < per_step:
            folder = workshop.fresh(step)
            for _ in range(KILLS_IN_A_ROW):
                process = Process(step.command(folder))
                time.sleep(rng.uniform(0, seconds))
                if not process.kill():
                    break
                counts[step.name] += 1
            workshop.finish(step, folder, expected)
    return counts
