"""From the flags of a dump to what fairseq-eval-lm iterates over while it dumps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..datastore import Datastore
from ..datastore.dump_plan import DumpPlan, sample_blocks
from ..datastore.key_codec import SAMPLE_ROWS, LearntCodec
from ..index import build_index_if_missing
from ..keys import DEFAULT_KEY, KeyExtractor, Model, check_model, resolve_layer
from ..machine import building_device
from ..memory.presets import flag
from .dry_run import describe_dump
from .dumping import DumpBatches, EntryMaker, KeyDumper, key_form
from .eval_lm import Groups


@dataclass
class DumpedText:
    """The split that a datastore is made of."""

    rows: np.ndarray  # entries of each block
    own_part: Callable[[int], tuple[int, int]]  # from the number of shards to the first and last that this process does
    source: dict[str, Any]  # what its states and tokens come from
    vocabulary_size: int
    skip: int  # positions at each block's start that are not of the corpus (the <s> of ``--add-bos-token``)


def prepare_dump(
    args: Any, model: Model, text: DumpedText, groups_of: Callable[[list[tuple[int, int]]], Groups]
) -> DumpBatches | list[dict]:
    """What eval_lm iterates over to write the missing shards of a part.

    Args:
        groups_of: batches of some ranges of blocks
    """
    check_model(model)
    form = key_form(model, args)
    facts: dict[str, Any] = {
        **form.facts(),
        "key": str(args.knn_key or DEFAULT_KEY),
        "layer": resolve_layer(model.decoder, args.knn_layer),
        "vocabulary_size": text.vocabulary_size,
        "source": text.source,
    }
    entries = EntryMaker(model, KeyExtractor(model, facts["key"], facts["layer"]), text.skip)

    def make_codec() -> LearntCodec:
        return entries.learn_codec(groups_of(sample_blocks(text.rows, SAMPLE_ROWS)), form)

    if args.knn_dry_run:
        describe_dump(args, text.rows, text.own_part, form, text.vocabulary_size, entries, groups_of)
        return []
    plan = DumpPlan(args.knn_dump, facts, text.rows, text.own_part, make_codec if form.is_compact else None)
    plan.announce()
    groups = groups_of(plan.block_ranges) if plan.shards else None
    return DumpBatches(groups, KeyDumper(entries, plan), plan, lambda: _build_index(args, model, plan))


def _build_index(args: Any, model: Model, plan: DumpPlan) -> None:
    if index := flag(args, "knn_index"):
        device = building_device(args.knn_device, next(model.parameters()).device)
        build_index_if_missing(Datastore(plan.folder), index, str(args.knn_metric), device)
