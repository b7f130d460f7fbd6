"""Work in one thread per block: errors are raised, threads are given back."""

import threading
import time

import pytest
import torch

from fairseq_knnlm.parallel import Unlocked, for_each


def test_the_first_error_is_raised_and_the_rest_not_run():
    done = []

    def work(number):
        if number == 3:
            raise ValueError("three")
        time.sleep(0.001)
        done.append(number)

    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="three"):
        for_each(work, ((number,) for number in range(10_000)))
    assert len(done) < 9_999
    assert torch.get_num_threads() == threads


def test_threads_are_given_back():
    """Two callers at once: the second must not restore the one thread that it found, for itself nor for others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen = {}

    def first():
        for_each(lambda _: (first_is_in.set(), second_is_in.wait(10)), [(0,), (1,)])
        seen["first"] = torch.get_num_threads()
        first_is_out.set()

    def second():
        first_is_in.wait(10)
        for_each(lambda _: (second_is_in.set(), first_is_out.wait(10)), [(0,), (1,)])
        seen["second"] = torch.get_num_threads()

    def later():
        seen["later"] = torch.get_num_threads()

    try:
        callers = [threading.Thread(target=first), threading.Thread(target=second)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        new = threading.Thread(target=later)
        new.start()
        new.join()
        assert seen == {"first": 3, "second": 3, "later": 3} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_a_thread_that_starts_late_still_uses_one():
    """A caller who is done sets torch's number back, while the threads of another caller have yet to start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def jobs():
        yield (0,)
        other = threading.Thread(target=for_each, args=(time.sleep, [(0,), (0,)]))
        other.start()
        other.join()
        yield (1,)

    def work(number):
        time.sleep(0.2)  # so that the second job needs a thread of its own
        return torch.get_num_threads()

    try:
        assert for_each(work, jobs()) == [1, 1]
    finally:
        torch.set_num_threads(threads)


def test_an_error_of_making_jobs_is_raised():
    def jobs():
        yield (1,)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        for_each(lambda number: number, jobs())


def test_results_come_in_order():
    def work(number):
        time.sleep(0.01 if number % 2 else 0)
        return number

    assert for_each(work, [(number,) for number in range(9)]) == [*range(9)]


def test_what_cannot_be_compiled_runs_as_it_stands():
    twice = Unlocked(lambda tensor: tensor * 2)  # TorchScript knows no lambdas
    assert twice(torch.tensor(4.0)) == 8
