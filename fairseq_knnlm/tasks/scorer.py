"""Our scoring in the place where fairseq expects a ``SequenceScorer``."""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from ..data.characters import is_character_level
from ..data.context_blocks import own_positions
from ..keys import Model
from ..memory import Memory
from ..mixture.scoring import read_tokens, score_tokens
from ..mixture.totals import Totals
from ..saved_runs.format import SaveWriter

logger = logging.getLogger(__name__)


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
    ):
        """
        Args:
            save: keeps what the mixture was made of
            skip: positions at each row's start that are not of the corpus (the <s> of ``--add-bos-token``)
        """
        super().__init__(tgt_dict, softmax_batch)
        self._of_characters = is_character_level(tgt_dict)
        self._memories, self._save, self._skip = memories, save, skip
        self.totals = Totals(memories)

    @torch.no_grad()
    def generate(self, models: list[Model], sample: dict, **kwargs: Any) -> list:
        (model,) = models
        read_tokens(model, sample.get("warm_up", []), self._memories, self._skip)
        # With a datastore, many batches are one step of fairseq's own bar.
        progress = "model" if any(memory.preferred_queries for memory in self._memories) else None
        scores = score_tokens(
            model, sample["batches"], self._memories, self._save, self._skip, self.softmax_batch, progress=progress
        )
        self.totals.add(scores)
        return self._hypotheses(sample["batches"], scores.mixture)

    def _hypotheses(self, batches: list[dict], scores: Tensor) -> list:
        """fairseq's result: for each row its tokens and their scores."""
        hypotheses = []
        for batch in batches:
            for row, mask in zip(batch["target"], own_positions(batch)):
                tokens = row[mask]
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
            if self._of_characters:
                bits = self.totals.bits("mixture")
                logger.info(f"bits per character: {bits:.4f} (a token is a character, so it is the loss in base 2)")
