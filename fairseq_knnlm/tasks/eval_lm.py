"""How our scorer, our batches and our dump get into the stock ``fairseq-eval-lm``: here and nowhere else."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from fairseq.sequence_scorer import SequenceScorer
from fairseq.utils import apply_to_sample, split_paths

from ..data.parts import ReadingPlan
from ..errors import KnnlmError
from ..progress import Style, progress
from .scorer import KNNSequenceScorer

logger = logging.getLogger(__name__)


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


def load_several_models() -> None:
    """Let the running eval_lm load every checkpoint of ``--path a.pt:b.pt``, once.

    fairseq-generate takes such a path apart and eval_lm's scorer averages any number of models, but eval_lm itself
    takes the whole of it for the name of one file.
    """
    modules = [module for module in _eval_lm_modules("checkpoint_utils") if hasattr(module, "eval_lm")]

    def load(paths: list[str], *args: Any, **kwargs: Any) -> Any:
        for module in modules:
            module.checkpoint_utils = checkpoint_utils
        files = [file for path in paths for file in ([path] if Path(path).exists() else split_paths(path))]
        return checkpoint_utils.load_model_ensemble_and_task(files, *args, **kwargs)

    for module in modules:
        module.checkpoint_utils = SimpleNamespace(load_model_ensemble_and_task=load)


def show_own_progress() -> None:
    """Keep fairseq's bar away once: our batches tell themselves how far they are, in tokens.

    Theirs counts steps, which are few and long here, and off a terminal it says nothing at all.
    """
    modules = _eval_lm_modules("progress_bar")

    def no_bar(
        batches: Iterable[dict], log_format: str | None = None, default_log_format: str = "tqdm", **_: Any
    ) -> Iterable[dict]:
        for module in modules:
            module.progress_bar = progress_bar
        Style.chosen = {"tqdm": "auto", "none": "none"}.get(log_format or default_log_format, "lines")
        return batches

    for module in modules:
        module.progress_bar = SimpleNamespace(progress_bar=no_bar)


def end_with(summary: str, with_loss: bool = True) -> None:
    """Let the last thing that eval_lm logs be this summary.

    Args:
        with_loss: False: leave out what eval_lm says of the loss over no tokens, which reads like a failure
    """
    for module in _eval_lm_modules("logger"):
        for present in [present for present in module.logger.filters if isinstance(present, _Ending)]:
            module.logger.removeFilter(present)
        module.logger.addFilter(_Ending(summary, with_loss))


class _Ending(logging.Filter):
    """Waits for the line with the loss, which is eval_lm's last one; once."""

    def __init__(self, summary: str, with_loss: bool):
        super().__init__()
        self._summary, self._with_loss = summary, with_loss

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if message.startswith("Loss (base 2)"):
            theirs = logging.getLogger(record.name)
            theirs.removeFilter(self)
            if self._with_loss:
                theirs.callHandlers(record)  # now, so that the summary comes after it
            logger.info(self._summary)
            return False
        return self._with_loss or not re.match("Evaluated [0-9,]+ tokens", message)


class Groups(Protocol):
    """Samples for our scorer or for a dump: {"batches": [...], "warm_up": [...]} and what eval_lm itself looks at."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[dict]: ...


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

    def __init__(self, groups: Groups, installed: InstalledScorer, plan: ReadingPlan, text: str):
        """text: what is scored, for the summary"""
        start, stop = plan.scored_tokens
        self._groups, self._installed, self._tokens, self._text = groups, installed, stop - start, text
        show_own_progress()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[dict]:
        scorer = self._installed.scorer
        if scorer is None:
            raise KnnlmError(
                "this fairseq builds its scorer in a way that fairseq-knnlm does not know; "
                "install fairseq-fixed 0.12 and run fairseq-eval-lm"
            )
        if not isinstance(scorer, KNNSequenceScorer):
            yield from self._groups
            return
        with progress("scoring", self._tokens, " tokens") as bar:
            for number, group in enumerate(self._groups, start=1):
                scorer.step = "" if len(self) == 1 else f", step {number} of {len(self)}"
                scorer.done = bar.update
                yield group
        scorer.finish()
        if scorer.totals.tokens:
            end_with(scorer.summary(self._text))
