"""Scored splits on disk, and what can be learnt from them without model and search: tuning and sweeps."""
