"""How our scorer, and the batches it likes, get into the stock ``fairseq-eval-lm``."""

import sys
from collections.abc import Callable, Iterator

import torch
from fairseq.sequence_scorer import SequenceScorer
from fairseq.utils import apply_to_sample

from .errors import KnnlmError
from .scorer import KNNSequenceScorer


class InstalledScorer:
    """Remembers the scorer that fairseq built, which proves that it did."""

    scorer: SequenceScorer | None = None


def install_scorer(make_scorer: Callable[..., SequenceScorer] | None) -> InstalledScorer | None:
    """Let the running eval_lm build our scorer where its code says SequenceScorer, once; None leaves it alone.

    eval_lm looks the name up in its module, which is ``__main__`` under ``python -m``.
    """
    if make_scorer is None:
        return None
    installed = InstalledScorer()
    modules = [sys.modules[name] for name in ("fairseq_cli.eval_lm", "__main__") if name in sys.modules]
    modules = [module for module in modules if getattr(module, "SequenceScorer", None) is not None]

    def build(*args, **kwargs) -> SequenceScorer:
        for module in modules:
            module.SequenceScorer = SequenceScorer
        installed.scorer = make_scorer(*args, **kwargs)
        return installed.scorer

    for module in modules:
        module.SequenceScorer = build
    return installed


class EvalBatches:
    """The batches of an evaluation, several at a time where the search wants many queries at once."""

    def __init__(
        self, batches, batches_at_once: int, installed: InstalledScorer | None, warm_up: list[tuple[int, int]]
    ):
        """
        Args:
            warm_up: ranges of blocks that are read and not scored
        """
        self._batches, self._group, self._installed = batches, batches_at_once, installed
        self._warm_up = warm_up

    def __len__(self) -> int:
        return -(-len(self._batches) // self._group)

    def __iter__(self) -> Iterator[dict]:
        if self._installed is None:
            yield from self._batches
            return
        scorer = self._installed.scorer
        if scorer is None:
            raise KnnlmError(
                "this fairseq builds its scorer in a way that fairseq-knnlm does not know; "
                "install fairseq-fixed 0.12 and run fairseq-eval-lm"
            )
        group: list[dict] = []
        warm_up: list[dict] = []
        for batch in self._batches:
            # What a worker has read is a file descriptor a tensor, as long as it is kept, and 1024 of them are few.
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
        if isinstance(scorer, KNNSequenceScorer):
            scorer.finish()


def _merge(batches: list[dict], warm_up: list[dict]) -> dict:
    """One sample out of several batches, with the fields that eval_lm itself looks at."""
    return {
        "batches": batches,
        "warm_up": warm_up,
        "id": torch.cat([batch["id"] for batch in batches]),
        "ntokens": sum(batch["ntokens"] for batch in batches),
        "net_input": batches[0]["net_input"],
    }
