"""Keys: which hidden state they are, how it is captured, and how the model is run to get it."""

from .extractor import KeyExtractor, check_model, key_dimension, resolve_layer, weights_fingerprint
from .families import DEFAULT_KEY, KEYS
from .running import Ensemble, Model, join, members_of

__all__ = [
    "DEFAULT_KEY",
    "KEYS",
    "Ensemble",
    "KeyExtractor",
    "Model",
    "check_model",
    "join",
    "key_dimension",
    "members_of",
    "resolve_layer",
    "weights_fingerprint",
]
