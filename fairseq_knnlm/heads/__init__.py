"""Learned memories: output embeddings, mixtures of softmaxes, clusters and small networks that stand for a datastore.

Everything here needs the keys and values of a datastore and nothing else: neither the language model nor fairseq.
"""

from .head import Head
from .head_file import HeadFacts, open_head, save_head

__all__ = ["Head", "HeadFacts", "open_head", "save_head"]
