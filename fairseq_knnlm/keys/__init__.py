"""Keys: which hidden state they are, how it is captured, and how the model is run to get it."""

from .extractor import (
    DEFAULT_KEY,
    KEYS,
    KeyExtractor,
    check_model,
    key_dimension,
    resolve_layer,
    weights_fingerprint,
)
from .running import Model

__all__ = [
    "DEFAULT_KEY",
    "KEYS",
    "KeyExtractor",
    "Model",
    "check_model",
    "key_dimension",
    "resolve_layer",
    "weights_fingerprint",
]
