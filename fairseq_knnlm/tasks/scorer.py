"""Our scoring in the place where fairseq expects a ``SequenceScorer``."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from ..data.characters import is_character_level
from ..data.context_blocks import own_positions
from ..data.lane_reading import in_lanes, rows_in_order
from ..data.text_counts import TextCounts
from ..errors import resumable
from ..keys import Model, join
from ..memory import Memory
from ..mixture.gate import Gate
from ..mixture.scoring import read_tokens, score_tokens
from ..mixture.totals import Totals
from ..progress import progress
from ..saved_runs.format import SaveWriter
from .summaries import scoring_summary

logger = logging.getLogger(__name__)

CANNOT_RESUME = (
    "scoring does not resume; run the same command again, or with --num-shards N --shard-id I, which scores one part"
)


class KNNSequenceScorer(SequenceScorer):
    """fairseq's scorer, with the mixture in place of the LM's probability. With no memory: the LM, faster.

    A sample holds several batches (see EvalBatches): the model runs on each, the search on all of them at once.
    """

    def __init__(
        self,
        tgt_dict: Dictionary,
        softmax_batch: int | None,
        memories: list[Memory],
        save: SaveWriter | None = None,
        skip: int = 0,
        gate: Gate | None = None,
        counts: TextCounts | None = None,
    ):
        """
        Args:
            save: keeps what the mixture was made of
            skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)
            gate: weights of each token, in place of the memories' own
            counts: words and bytes of the text, where they are known
        """
        super().__init__(tgt_dict, softmax_batch)
        self._counts = counts
        self._of_characters = is_character_level(tgt_dict)
        self._memories, self._save, self._skip, self._gate = memories, save, skip, gate
        self.totals = Totals(memories)
        self.done: Callable[[int], None] | None = None  # is told of tokens that the model has been through
        self.step = ""  # which of the steps the next sample is, for the name of its bar

    @torch.no_grad()
    def generate(self, models: list[Model], sample: dict, **kwargs: Any) -> list:
        with resumable(CANNOT_RESUME):
            return self._score(join(models), sample)

    def _score(self, model: Model, sample: dict) -> list:
        read_tokens(model, sample.get("warm_up", []), self._memories, self._skip)
        batches = sample["batches"]
        # With a datastore a sample is many batches, so its model and its search are shown one after the other.
        in_steps = any(memory.preferred_queries for memory in self._memories)
        with progress(f"model{self.step}", self._tokens_of(batches), " tokens") if in_steps else nullcontext() as bar:
            done = self.done if bar is None else bar.update
            scores = score_tokens(
                model, batches, self._memories, self._save, self._skip, self.softmax_batch, done=done, gate=self._gate
            )
        if in_steps and self.done is not None:
            self.done(len(scores))
        self.totals.add(scores)
        return self._hypotheses(batches, scores.mixture)

    def _tokens_of(self, batches: list[dict]) -> int:
        return sum(int(own_positions(batch, self._skip).sum()) for batch in batches)

    def _hypotheses(self, batches: list[dict], scores: Tensor) -> list:
        """fairseq's result: for each row its tokens and their scores."""
        if in_lanes(batches):
            rows = rows_in_order(batches)
        else:
            rows = [row[mask] for batch in batches for row, mask in zip(batch["target"], own_positions(batch))]
        hypotheses = []
        for tokens in rows:
            count = len(tokens) - self._skip
            own_scores, scores = scores[:count], scores[count:]
            own_scores = F.pad(own_scores, (self._skip, 0))  # fairseq takes these off again
            hypothesis = {
                "tokens": tokens,
                "score": own_scores.mean(),
                "attention": None,
                "alignment": None,
                "positional_scores": own_scores,
            }
            hypotheses.append([hypothesis])
        return hypotheses

    def finish(self) -> None:
        """After the last batch."""
        tokens = self.totals.tokens
        if self._save:  # first, so that nothing that follows can lose it
            self._save.finish(self.totals.perplexity("mixture") if tokens else float("nan"))
            logger.info(f"saved to {self._save.folder}: try knnlm tune and knnlm sweep on it")
        if tokens:
            logger.info(self.totals.summary())
            if self._counts is not None:
                logger.info(self._counts.sentence(self.totals.sums))
            if hint := self.totals.hint(str(self._save.folder) if self._save else None):
                logger.warning(hint)
            if self._of_characters:
                bits = self.totals.bits("mixture")
                logger.info(f"bits per character: {bits:.4f} (a token is a character, so it is the loss in base 2)")

    def summary(self, text: str) -> str:
        """What a person reads last. text: what was scored."""
        folder = self._save.folder if self._save else None
        return scoring_summary(text, self.totals, self._memories, folder, self._counts)
