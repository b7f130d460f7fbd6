"""Which entries does a datastore need? Every method looks at one inverted list at a time, so memory stays bounded."""

from .selection import METHODS, PruneOptions, prune

__all__ = ["METHODS", "PruneOptions", "prune"]
