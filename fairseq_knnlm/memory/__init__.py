"""Memories: what gives log p of the next token for a query. A datastore and the continuous cache are two of them."""

from .base import KeptLogProbs, KeptNeighbors, Memory, MemoryFacts, MemoryScores, name_memories
from .cache import ContinuousCache, Documents
from .datastore_memory import DatastoreMemory

__all__ = [
    "ContinuousCache",
    "DatastoreMemory",
    "Documents",
    "KeptLogProbs",
    "KeptNeighbors",
    "Memory",
    "MemoryFacts",
    "MemoryScores",
    "name_memories",
]
