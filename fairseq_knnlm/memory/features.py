"""What a gate may look at: how near a query's neighbours are, and how the mass falls off with the distance.

The mass is that of everything that took part, relative to the nearest entry, which counts 1: its logarithm is 0 where
one entry has all, and the larger the more entries are as near. At several sharpnesses it is a profile of them. Nothing
here depends on the target.
"""

import torch
from torch import Tensor

NEAREST = "nearest"  # the largest similarity
PROFILE = (1.0, 2.0, 0.5)  # of a memory's own sharpness: a factor of two costs next to nothing

Features = dict[str, Tensor]  # name -> (n,) float32, -inf where there is no neighbour


def mass_name(sharpness: float) -> str:
    """What the log of the relative mass at a sharpness (1 / temperature, or theta) is called."""
    return f"mass at {sharpness:.6g}"


def relative_mass(log_mass: Tensor, nearest: Tensor) -> Tensor:
    """Log of the mass relative to the nearest entry: log of the mass (n,), of that of the nearest (n,) -> (n,)."""
    return (log_mass - nearest).float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def neighbor_features(
    similarities: Tensor, sharpnesses: list[float], log_weights: Tensor | None = None
) -> Features:
    """Of similarities (n, k), -inf where there is no neighbour, and log weights (n, k), at each sharpness."""
    nearest = similarities.amax(dim=1)
    gaps = nearest.nan_to_num(neginf=0.0)[:, None] - similarities  # infinite for none
    return {NEAREST: nearest, **gap_features(gaps, sharpnesses, log_weights)}


def gap_features(gaps: Tensor, sharpnesses: list[float], log_weights: Tensor | None = None) -> Features:
    """The profile alone, of how much less similar each neighbour is than the nearest: (n, k), infinite for none."""
    features, absent = {}, gaps == torch.inf
    for sharpness in sharpnesses:
        scores = gaps * -sharpness if log_weights is None else gaps * -sharpness + log_weights
        masses = scores.masked_fill_(absent, -torch.inf).logsumexp(dim=1)
        features[mass_name(sharpness)] = masses
    return features
