"""SPALM (Yogatama et al. 2021): a Transformer-XL that reads retrieved tokens through a gate."""

from . import model, task  # noqa: F401  registers transformer_xl_lm, spalm_lm and the task spalm
