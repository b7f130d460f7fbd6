"""A language modelling task that generates with the mixture, and with the model's own tokenizer where it has one."""

import logging
import time
from typing import Any

from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.language_modeling import LanguageModelingTask

from ..data.hf_tokenizer import DictionaryWords, HFTokenizer
from ..data.text_encoding import DictionaryText, TextForm
from ..errors import KnnlmError
from ..keys import Model, join
from ..mixture.generation import KNNLanguageModel
from .config import refuse_idle_flags
from .gating import open_mixture

logger = logging.getLogger(__name__)


class GeneratingTask(LanguageModelingTask):
    """What ``fairseq-interactive`` and ``fairseq-generate`` ask of a task."""

    mixture: KNNLanguageModel | None = None  # that build_generator made of the LM and its memories

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Those that were built, of which --path names several: fairseq does not pass them on to what needs them.
        self.models: list[Model] = []

    @property
    def model(self) -> Model:
        """The only model, or all of ``--path`` as one."""
        if not self.models:
            raise RuntimeError("the task has built no model yet")
        return join(self.models)

    @property
    def text(self) -> TextForm:
        """How the model reads raw text."""
        own = getattr(self.models[-1], "text", None) if self.models else None
        return own or DictionaryText(self.dictionary)

    def build_generator(self, models: list[Model], args: Any, *extra: Any, **kwargs: Any) -> Any:
        """The stock generator; with datastores or heads on a model whose probabilities are the mixture's."""
        for option in ("knn_dump", "knn_cache_size", "knn_save"):
            if getattr(self.args, option):
                name = "--" + option.replace("_", "-")
                raise KnnlmError(f"{name} is for fairseq-eval-lm; generate without it")
        refuse_idle_flags(self.args)
        if self.args.knn_datastore or self.args.knn_head:
            if len(models) != 1:
                flag = "--knn-datastore" if self.args.knn_datastore else "--knn-head"
                raise KnnlmError(f"{flag} goes with one checkpoint; give --path only one")
            self.mixture = KNNLanguageModel(models[0], *open_mixture(self.args, models[0], self.target_dictionary))
            models = [self.mixture]
        if self.text.end != self.target_dictionary.eos():
            kwargs["extra_gen_cls_kwargs"] = {**(kwargs.get("extra_gen_cls_kwargs") or {}), "eos": self.text.end}
        return super().build_generator(models, args, *extra, **kwargs)

    def build_bpe(self, args: Any) -> Any:
        """The model's own tokenizer, where it has one."""
        other = super().build_bpe(args)
        if not isinstance(self.text, HFTokenizer):
            return other
        if other is not None:
            raise KnnlmError("the model has a tokenizer of its own; leave out --bpe")
        return DictionaryWords(self.text, self.dictionary)

    def inference_step(
        self, generator: Any, models: list[Model], sample: dict, prefix_tokens: Any = None, constraints: Any = None
    ) -> Any:
        if isinstance(generator, SequenceScorer):  # --score-reference
            scored = models if self.mixture is None else [self.mixture]
            return super().inference_step(generator, scored, sample, prefix_tokens, constraints)
        model = generator.model.single_model
        if not isinstance(model, KNNLanguageModel):
            return super().inference_step(generator, models, sample, prefix_tokens, constraints)
        started, search, steps = time.perf_counter(), model.search_seconds, model.steps
        result = super().inference_step(generator, models, sample, prefix_tokens, constraints)
        seconds, search, steps = time.perf_counter() - started, model.search_seconds - search, model.steps - steps
        if steps:
            logger.info(
                f"kNN-LM: {steps} steps of {1000 * seconds / steps:.1f} ms, of which model "
                f"{1000 * (seconds - search) / steps:.1f} ms and search {1000 * search / steps:.1f} ms"
            )
        return result

    def build_dataset_for_inference(self, src_tokens: Any, src_lengths: Any, **kwargs: Any) -> Any:
        longest, limit = int(max(src_lengths)), self.model.max_positions()
        if limit is not None and longest >= limit:  # fairseq's own message is a traceback
            raise KnnlmError(
                f"a prompt has {longest - 1} tokens, but the model has {limit} positions; shorten it to leave room for "
                "what is to be generated"
            )
        return super().build_dataset_for_inference(src_tokens, src_lengths, **kwargs)
