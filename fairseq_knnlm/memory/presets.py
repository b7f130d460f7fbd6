"""Flags that ``--knn-preset`` gives a value to."""

from typing import Any

from ..errors import KnnlmError

# --knn-preset -> flags and their values; a flag that is given wins.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"knn_k": "all", "knn_nprobe": 16, "knn_far": 64},
    "paper": {"knn_index": "paper", "knn_k": "1024", "knn_lambda": "0.25", "knn_temperature": "1"},
}


def flag(args: Any, name: str) -> Any:
    """What a flag says, or else ``--knn-preset``; None: neither does."""
    if args.knn_preset is None:
        return getattr(args, name)
    if args.knn_preset not in PRESETS:
        raise KnnlmError(f"--knn-preset takes {' or '.join(PRESETS)}, not '{args.knn_preset}'")
    value = getattr(args, name)
    return PRESETS[args.knn_preset].get(name) if value is None else value


def has_fixed_mixture(args: Any) -> bool:
    """Whether ``--knn-preset`` says lambda and temperature, so that tuned values of what is beside them do not fit."""
    return "knn_lambda" in PRESETS.get(args.knn_preset, {})
