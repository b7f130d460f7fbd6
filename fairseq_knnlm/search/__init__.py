"""Searching: one protocol, several engines.

Those that can visit whole clusters also answer ``target_mass``, which needs no selection.
"""

from .exact import ExactSearch
from .ivf import ClusterSearch
from .local import FaissSearch, Rescored
from .protocol import MassSearch, Search

__all__ = ["ClusterSearch", "ExactSearch", "FaissSearch", "MassSearch", "Rescored", "Search"]
