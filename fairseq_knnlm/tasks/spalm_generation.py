"""SPALM with live retrieval: opening the frozen LM and its datastore, and generating with them."""

import logging
import time
from typing import Any

from ..data.dictionaries import dictionary_facts
from ..errors import KnnlmError
from ..keys import Model
from ..memory.live_neighbors import LiveNeighbors, open_live_neighbors
from ..models.live_spalm import LiveDecoder, LiveSPALM
from ..models.spalm_lm import SPALMDecoder
from .config import KNNLanguageModelingConfig
from .loading import load_model

logger = logging.getLogger(__name__)

OF_A_MIXTURE = (
    "knn_lambda", "knn_temperature", "knn_k", "knn_preset", "knn_head", "knn_gate", "knn_cache_size", "knn_dump",
    "knn_save",
)  # fmt: skip


def open_key_lm(args: Any, decoder: SPALMDecoder) -> LiveNeighbors:
    """The neighbours that a SPALM reads of any text."""
    if not (args.knn_key_lm and args.knn_datastore):
        raise KnnlmError(
            "SPALM reads retrieved tokens, for which it needs the frozen LM and its datastore; give --knn-key-lm "
            "CHECKPOINT and --knn-datastore DIR"
        )
    for option in OF_A_MIXTURE:
        if getattr(args, option):
            raise KnnlmError(
                f"--{option.replace('_', '-')} is for a mixture, and with --knn-key-lm the datastore gives SPALM its "
                "neighbours instead; leave it out"
            )
    config = KNNLanguageModelingConfig(data=args.data)
    _, key_lm = load_model(args.knn_key_lm, config)
    return open_live_neighbors(args, key_lm, dictionary_facts(decoder.dictionary), decoder.neighbors_used)


def load_spalm(args: Any) -> tuple[Model, LiveNeighbors]:
    """A SPALM (args.path, args.data) with its live neighbours (args.key_lm and the --knn- flags)."""
    _, model = load_model(args.path, KNNLanguageModelingConfig(data=args.data))
    if not isinstance(model.decoder, SPALMDecoder) or not model.decoder.neighbors_used:
        raise KnnlmError(f"{args.path} is no SPALM that reads neighbours; leave out --key-lm")
    config = KNNLanguageModelingConfig(data=args.data)
    for name, value in vars(args).items():
        if name.startswith("knn_"):
            setattr(config, name, value)
    config.knn_key_lm = args.key_lm  # type: ignore[attr-defined]
    return model, open_key_lm(config, model.decoder)


def live_model(args: Any, model: Any) -> LiveSPALM:
    """A model for fairseq's generator out of a checkpoint of spalm_lm or transformer_xl_lm."""
    decoder, neighbors = model.decoder, None
    if isinstance(decoder, SPALMDecoder) and decoder.neighbors_used:
        neighbors = open_key_lm(args, decoder)
        logger.info(
            f"neighbours: {neighbors.k} of {len(neighbors.datastore):,} entries of {neighbors.datastore.folder}, "
            f"index {neighbors.search['index']}, nprobe {neighbors.search['nprobe']}"
        )
    elif args.knn_key_lm or args.knn_datastore:
        raise KnnlmError("this model reads no retrieved tokens; leave out --knn-key-lm and --knn-datastore")
    return LiveSPALM(model, neighbors, args.tokens_per_sample).eval()


class StepTimes:
    """Tells how long the steps of a generation took."""

    def __init__(self, model: Model):
        self._decoder: LiveDecoder = model.decoder
        self._before = (time.perf_counter(), self._decoder.search_seconds, self._decoder.steps)

    def tell(self) -> None:
        now = (time.perf_counter(), self._decoder.search_seconds, self._decoder.steps)
        seconds, search, steps = (after - before for after, before in zip(now, self._before))
        if steps:
            logger.info(
                f"SPALM: {steps} steps of {1000 * seconds / steps:.1f} ms, of which model "
                f"{1000 * (seconds - search) / steps:.1f} ms and frozen LM and search {1000 * search / steps:.1f} ms"
            )
