"""Small untrained networks."""

import numpy as np
import torch

from fairseq_knnlm.models.transformer_xl import TransformerXLConfig, TransformerXLDecoder


class Dictionary:
    """Just enough of fairseq's."""

    def __len__(self):
        return 40

    def pad(self):
        return 1

    def eos(self):
        return 2


def decoder(kind=TransformerXLDecoder, config=TransformerXLConfig, **settings):
    torch.manual_seed(0)
    settings = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "dropout": 0.0, "memory_size": 100, **settings}
    model = kind(config(**settings), Dictionary()).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(rows, length, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(4, 40, (rows, length)))
