"""Several processes at once on one folder: each succeeds or says who is at work, and the result is that of one."""

from workshop import Process, Workshop

BUSY = "another process"


def run_together(workshop: Workshop, rounds: int = 2) -> dict[str, int]:
    """Two and three processes at once, in each step; how many processes of each step."""
    counts = {}
    for step in workshop.steps:
        expected, _ = workshop.reference(step)
        counts[step.name] = 0
        for _ in range(rounds):
            for number in (2, 3):
                folder = workshop.fresh(step)
                processes = [Process(step.command(folder)) for _ in range(number)]
                outcomes = [process.wait() for process in processes]
                for outcome in outcomes:
                    if outcome.code:
                        sentence = outcome.check_one_sentence()
                        assert BUSY in sentence or "exists already" in sentence, sentence
                assert any(outcome.code == 0 for outcome in outcomes), outcomes
                workshop.finish(step, folder, expected)
                counts[step.name] += number
    return counts
