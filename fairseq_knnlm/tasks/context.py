"""How much text the model reads at once: what does not fit is refused, what makes results worse is said."""

import logging
from typing import Any

from fairseq.modules import LearnedPositionalEmbedding

from ..datastore import Datastore
from ..errors import KnnlmError
from ..keys import Model, members_of

logger = logging.getLogger(__name__)


def check_lengths(model: Model, longest: int, max_positions: int | None, context_window: int) -> None:
    """Refuse what fairseq would drop in silence (blocks that are too long) or crash on.

    Args:
        longest: tokens of the longest block, without its context
    """
    decoders = [member.decoder for member in members_of(model)]
    positions = [getattr(decoder, "embed_positions", None) for decoder in decoders]
    learned = any(isinstance(position, LearnedPositionalEmbedding) for position in positions)
    limited = learned or any(getattr(decoder, "limits_context", False) for decoder in decoders)
    with_context = longest + context_window if limited else longest  # sinusoids extrapolate
    if max_positions is not None and with_context > max_positions:
        raise KnnlmError(
            f"samples of {with_context} tokens do not fit the model's {max_positions} positions; "
            f"use --tokens-per-sample {max_positions} or less (it includes --context-window)"
        )


def trained_length(model_args: Any) -> int | None:
    """Tokens of a sample in training, as the configuration in a checkpoint says; None: it does not."""
    length = getattr(model_args, "tokens_per_sample", None)
    return length if isinstance(length, int) and length > 0 else None


def warn_of_long_context(trained: int | None, asked: int) -> None:
    """A model that reads more at once than it was trained with predicts worse, not better.

    Args:
        asked: --tokens-per-sample, the context included
    """
    if trained is not None and asked > trained:
        logger.warning(
            f"warning: --tokens-per-sample {asked} is more than the {trained} tokens that the checkpoint was trained "
            f"with, which mostly makes it worse; try --tokens-per-sample {trained} --context-window {trained // 2}"
        )


def warn_of_other_context(datastores: list[Datastore], here: dict[str, Any]) -> None:
    """Keys and queries are alike if they have seen as much text before them.

    Args:
        here: what this run's own manifest would say of its source
    """
    names = ("tokens_per_sample", "context_window")
    wanted = {name: here[name] for name in names}
    for datastore in datastores:
        source = datastore.manifest.source
        there = {name: source.get(name) for name in names}
        if None not in there.values() and there != wanted:  # an imported datastore does not say
            logger.warning(
                f"warning: {datastore.folder} was dumped with {_flags(there)}, this run has {_flags(wanted)}; the same "
                "for both is mostly best"
            )


def _flags(values: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
