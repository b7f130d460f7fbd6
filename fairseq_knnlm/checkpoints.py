"""Let old public checkpoints load without letting them run code.

torch.load refuses classes it does not know. Older checkpoints keep their configuration in the ones below, which hold
plain data; nothing else is allowed.
"""

import argparse
import collections
import typing

import omegaconf
import torch

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
