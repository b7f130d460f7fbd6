"""Neighbours of a text as it grows: the frozen LM that made a datastore reads it, and the datastore is searched.

What ``knnlm neighbors`` does for a split in advance, here for each next token: same keys, same search, same tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError
from ..keys import KeyExtractor, Model, check_model, resolve_layer, weights_fingerprint
from ..search import Search
from .engines import choose_index, make_engine
from .extent import limit_nprobe, lists_to_visit
from .neighbor_search import search_outside
from .opening import check_match
from .presets import flag

WITHOUT_RECORD = 512  # tokens that the LM reads at once where the datastore does not say


@dataclass
class Found:
    """The neighbours of n positions, nearest first; -1 where there are fewer than k."""

    tokens: np.ndarray  # (n, k)
    ids: np.ndarray  # (n, k) entries of the datastore
    distances: np.ndarray  # (n, k)


class LiveNeighbors:
    """A datastore with the LM that made it."""

    def __init__(self, model: Model, datastore: Datastore, engine: Search, k: int, search: dict[str, Any]):
        """
        Args:
            model: that made the datastore
            k: neighbours of each position
            search: what the engine is, for people: metric, index, nprobe
        """
        manifest, source = datastore.manifest, datastore.manifest.source
        self.model, self.datastore, self.engine, self.k, self.search = model, datastore, engine, k, search
        self._extractor = KeyExtractor(model, manifest.key, resolve_layer(model.decoder, manifest.layer))
        self._context = int(source.get("context_window") or 0)
        read = source.get("tokens_per_sample") or min(WITHOUT_RECORD, model.max_positions() or WITHOUT_RECORD)
        self._block = max(1, int(read) - self._context)
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def of_next(self, source: Tensor) -> Found:
        """The neighbours of the token that follows each row: source (B, n), which begins with </s> -> (B, k).

        The LM reads each position with the context that it had in the dump: the block that the position is in, and
        ``--context-window`` tokens before that block.
        """
        begin = self._begin(source.size(1) - 1)
        return self._search(self._keys(source[:, begin:])[:, -1])

    @torch.no_grad()
    def of_text(self, source: Tensor) -> Found:
        """The neighbours of every token of a text: source (n,), which begins with </s> -> (n, k)."""
        keys = []
        for start in range(0, len(source), self._block):
            begin, stop = self._begin(start), min(start + self._block, len(source))
            keys.append(self._keys(source[None, begin:stop])[0, start - begin :])
        return self._search(torch.cat(keys))

    def _begin(self, position: int) -> int:
        """From where on the LM reads, to predict the token at a position."""
        return max(0, position // self._block * self._block - self._context)

    def _keys(self, source: Tensor) -> Tensor:
        lengths = torch.full((len(source),), source.size(1))
        return self._extractor.run(self.model, {"src_tokens": source.to(self._device), "src_lengths": lengths})

    def _search(self, keys: Tensor) -> Found:
        if self.datastore.manifest.key_dtype != "float32":
            keys = keys.half()  # as a dump of the same text would hold them, for the same neighbours to the last one
        queries = self.datastore.codec.project(keys.float().cpu().numpy())
        distances, ids = search_outside(self.engine, queries, self.k, None, 0)
        tokens = np.where(ids >= 0, self.datastore.values_of(ids).astype(np.int64), -1)
        return Found(tokens, ids, distances)


def open_live_neighbors(args: Any, model: Model, dictionary_facts: dict[str, Any], k: int) -> LiveNeighbors:
    """What --knn-key-lm, --knn-datastore, --knn-index, --knn-metric and --knn-nprobe ask for, checked.

    Args:
        model: of --knn-key-lm
        k: how many neighbours SPALM reads
    """
    if "," in args.knn_datastore:
        raise KnnlmError("SPALM reads neighbours of one datastore; give --knn-datastore only one")
    datastore, metric = Datastore(args.knn_datastore), str(args.knn_metric)
    check_model(model)
    try:
        check_match(datastore, args, model, weights_fingerprint(model), dictionary_facts)
    except KnnlmError as error:
        raise KnnlmError(str(error).replace("--path", "--knn-key-lm")) from error
    info = choose_index(datastore, flag(args, "knn_index"), k, metric, "index", "exact")
    nprobe = limit_nprobe(lists_to_visit(args), info)
    engine = make_engine(datastore, info, k, metric, "index", "exact", nprobe)
    return LiveNeighbors(
        model, datastore, engine, k, {"metric": metric, "index": info.name if info else "flat", "nprobe": nprobe}
    )
