"""What fairseq gets to know: one import a registration, and what its commands need to run them well."""

import argparse
import collections
import typing

import omegaconf
import torch

from .errors import KnnlmError, show_knnlm_errors_as_one_sentence

try:
    import faiss  # noqa: F401
except ImportError as error:
    raise KnnlmError("faiss is missing; pip install 'fairseq-knnlm[cpu]', or [gpu] where there is a GPU") from error

from . import task  # noqa: F401  registers knn_language_modeling

show_knnlm_errors_as_one_sentence()

# torch.load refuses unknown classes, so that no code of a checkpoint runs. Older public checkpoints keep their
# configuration in these, which hold plain data.
torch.serialization.add_safe_globals(
    [
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
)
