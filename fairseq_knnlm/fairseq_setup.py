"""What has to be set up once before fairseq runs with this package: in a fairseq command, and in ``knnlm``."""

import argparse
import collections
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import omegaconf
import torch

from .errors import check_faiss_is_installed

# Older checkpoints keep their configuration in these classes, which hold plain data. torch.load refuses every class
# that it does not know, since it could run code; nothing else is allowed.
CLASSES_OF_OLD_CHECKPOINTS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    omegaconf.DictConfig,
    omegaconf.ListConfig,
    omegaconf.base.ContainerMetadata,
    omegaconf.base.Metadata,
    omegaconf.nodes.AnyNode,
    omegaconf.nodes.BooleanNode,
    omegaconf.nodes.FloatNode,
    omegaconf.nodes.IntegerNode,
    omegaconf.nodes.StringNode,
    collections.defaultdict,
    typing.Any,
    dict,
    list,
    int,
]


def set_up_fairseq() -> None:
    """Let old checkpoints load, give fairseq what newer libraries no longer have, and check for FAISS."""
    check_faiss_is_installed()
    torch.serialization.add_safe_globals(CLASSES_OF_OLD_CHECKPOINTS)
    if not hasattr(np, "compat"):
        # --sample-break-mode eos, and with it all generation from a language model, asks for np.compat.long.
        np.compat = SimpleNamespace(long=np.int64)  # type: ignore[attr-defined]  # gone since NumPy 2
