"""Searching a datastore: one base, several engines. Imports neither fairseq nor anything about probabilities."""

from .engine import Search
from .exact import ExactSearch
from .faiss_engine import FaissSearch, RescoredSearch
from .inverted_lists import ListSearch

__all__ = ["ExactSearch", "FaissSearch", "ListSearch", "RescoredSearch", "Search"]
