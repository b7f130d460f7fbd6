"""Scored splits on disk, and what can be learnt from them without model and search: tuning and sweeps."""

# that a sweep can vary
KNOBS = ("lambda", "temperature", "k", "head-lambda", "cache-lambda", "cache-theta", "cache-size")
