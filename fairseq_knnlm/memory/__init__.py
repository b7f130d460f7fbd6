"""Memories: what gives log p of the next token for a query. A datastore, a learned head, the continuous cache."""

from .base import KeptLogProbs, KeptNeighbors, Memory, MemoryFacts, MemoryScores, VocabularyScores, name_memories
from .cache import ContinuousCache, Documents
from .datastore_memory import DatastoreMemory
from .head_memory import HeadMemory

__all__ = [
    "ContinuousCache",
    "DatastoreMemory",
    "Documents",
    "HeadMemory",
    "KeptLogProbs",
    "KeptNeighbors",
    "Memory",
    "MemoryFacts",
    "MemoryScores",
    "VocabularyScores",
    "name_memories",
]
