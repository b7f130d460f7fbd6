"""The sums that a softmax over every visited entry is made of, in logarithms; they can be joined in any order."""

from dataclasses import dataclass, fields

import numpy as np


@dataclass
class Masses:
    """The logs of the two sums, at each sharpness; and what the mean log mass of a query's lists is made of."""

    target: np.ndarray  # (factors, n)
    total: np.ndarray  # (factors, n)
    sum_of_logs: np.ndarray | None = None  # (factors, n) of the total mass of each list that a query has visited
    lists: np.ndarray | None = None  # (n,) how many those are
    largest: np.ndarray | None = None  # (n,) the largest similarity, divided by the first temperature; -inf for none
    early: np.ndarray | None = None  # (n, names) what was known before any list was read; see ``Search.early_names``
    expected: np.ndarray | None = None  # (n, lists) log of the share of the mass that each list was expected to hold
    ranked: np.ndarray | None = None  # (2, ranks, n) target and total of the nearest list, the next, the next 2, 4, ...

    def mean_log_mass(self) -> np.ndarray:
        """The mean, over the lists that a query has visited, of the log of their mass: (factors, n)."""
        assert self.sum_of_logs is not None and self.lists is not None
        return self.sum_of_logs / np.maximum(self.lists, 1)


def join_masses(parts: list[Masses]) -> Masses:
    """The sums over the lists of several visitors."""
    joined = parts[0]
    for part in parts[1:]:
        joined = Masses(
            np.logaddexp(joined.target, part.target),
            np.logaddexp(joined.total, part.total),
            None if part.sum_of_logs is None else joined.sum_of_logs + part.sum_of_logs,
            None if part.lists is None else joined.lists + part.lists,
            None if part.largest is None or joined.largest is None else np.maximum(joined.largest, part.largest),
            ranked=None if part.ranked is None or joined.ranked is None else np.logaddexp(joined.ranked, part.ranked),
        )
    return joined


NOTHING = {"sum_of_logs": 0.0, "lists": 0.0}  # what a query has that visits no list; of all other fields -inf


def spread_masses(part: Masses, rows: np.ndarray, count: int) -> Masses:
    """The sums of some queries, ``rows`` (r,), among ``count`` queries of which the others visit no list."""
    spread = {}
    for field in fields(Masses):
        some = getattr(part, field.name)
        if some is not None:
            spread[field.name] = np.full((*some.shape[:-1], count), NOTHING.get(field.name, -np.inf), some.dtype)
            spread[field.name][..., rows] = some
    return Masses(**spread)
