"""How our scorer, our batches and our dump get into the stock ``fairseq-eval-lm``: here and nowhere else."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.sequence_scorer import SequenceScorer
from fairseq.utils import apply_to_sample

from ..data.parts import ReadingPlan
from ..errors import KnnlmError
from .scorer import KNNSequenceScorer


class InstalledScorer:
    """Remembers the scorer that fairseq built, which proves that it did."""

    scorer: SequenceScorer | None = None


def install_scorer(make_scorer: Callable[..., SequenceScorer]) -> InstalledScorer:
    """Let the running eval_lm build our scorer where its code says SequenceScorer, once.

    eval_lm looks the name up in its module, which is ``__main__`` under ``python -m``.
    """
    installed = InstalledScorer()
    modules = _eval_lm_modules("SequenceScorer")

    def build(*args: Any, **kwargs: Any) -> SequenceScorer:
        for module in modules:
            module.SequenceScorer = SequenceScorer
        installed.scorer = make_scorer(*args, **kwargs)
        return installed.scorer

    for module in modules:
        module.SequenceScorer = build
    return installed


def _eval_lm_modules(name: str) -> list:
    modules = [sys.modules[module] for module in ("fairseq_cli.eval_lm", "__main__") if module in sys.modules]
    return [module for module in modules if getattr(module, name, None) is not None]


def say_that_a_dump_has_no_loss() -> None:
    """eval_lm ends by logging a loss over no tokens, which reads like a failure or like a result; say what it is."""
    for module in _eval_lm_modules("logger"):
        if not any(isinstance(present, _NoLoss) for present in module.logger.filters):
            module.logger.addFilter(_NoLoss())


class _NoLoss(logging.Filter):
    """Leaves out the number of evaluated tokens, and replaces the line with the loss; once."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if re.match("Evaluated [0-9,]+ tokens", message):
            return False
        if message.startswith("Loss (base 2)"):
            record.msg, record.args = "a dump computes no loss; score a split with --knn-datastore", ()
            logging.getLogger(record.name).removeFilter(self)
        return True


class GroupedBatches:
    """The batches of an evaluation, several at a time, with what is read and not scored apart.

    A sample is {"batches": [...], "warm_up": [...]} and the fields that eval_lm itself looks at.
    """

    def __init__(self, batches: Any, tokens_at_once: int, plan: ReadingPlan):
        self._batches, self._warm_up = batches, plan.warm_up
        self._group = max(1, round(tokens_at_once * len(batches) / plan.tokens)) if plan.tokens else 1

    def __len__(self) -> int:
        return -(-len(self._batches) // self._group)

    def __iter__(self) -> Iterator[dict]:
        group: list[dict] = []
        warm_up: list[dict] = []
        for batch in self._batches:
            # What a worker has read is a file descriptor per tensor, as long as it is kept, and 1024 of them are few.
            batch = apply_to_sample(torch.clone, batch)
            if any(start <= batch["id"][0] < stop for start, stop in self._warm_up):
                warm_up.append(batch)
                continue
            group.append(batch)
            if len(group) == self._group:
                yield _merge(group, warm_up)
                group, warm_up = [], []
        if group:
            yield _merge(group, warm_up)


def _merge(batches: list[dict], warm_up: list[dict]) -> dict:
    """One sample out of several batches, with the fields that eval_lm itself looks at."""
    return {
        "batches": batches,
        "warm_up": warm_up,
        "id": torch.cat([batch["id"] for batch in batches]),
        "ntokens": sum(batch["ntokens"] for batch in batches),
        "net_input": batches[0]["net_input"],
    }


class ScoredBatches:
    """Groups of batches for our scorer, which is told when the last one has been scored."""

    def __init__(self, groups: GroupedBatches, installed: InstalledScorer):
        self._groups, self._installed = groups, installed

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[dict]:
        scorer = self._installed.scorer
        if scorer is None:
            raise KnnlmError(
                "this fairseq builds its scorer in a way that fairseq-knnlm does not know; "
                "install fairseq-fixed 0.12 and run fairseq-eval-lm"
            )
        yield from self._groups
        if isinstance(scorer, KNNSequenceScorer):
            scorer.finish()
