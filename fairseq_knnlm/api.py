"""A kNN-LM in a program: load a checkpoint with its datastores, score, sample, and look at neighbours.

    from fairseq_knnlm import KNNLM
    lm = KNNLM.from_pretrained("checkpoints", "checkpoint_best.pt", "data-bin/wiki", datastore="datastore")
    lm.score("The tournament format").perplexity
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator

from .errors import KnnlmError
from .fairseq_setup import set_up_fairseq
from .memory.contexts import Contexts
from .memory.nearest import nearest_neighbors
from .mixture.generation import KNNLanguageModel
from .mixture.interpolation import perplexity
from .mixture.scoring import TokenScores
from .mixture.text import TextScorer
from .tasks.config import KNNLanguageModelingConfig
from .tasks.loading import load_text_scorer


@dataclass
class TextScores:
    """The tokens of a text and what the LM, the memories and the mixture say of them (natural logarithms)."""

    tokens: list[str]
    lm_log_probs: list[float]
    log_probs: list[float]  # of the mixture
    memory_log_probs: list[list[float]] = field(repr=False)  # of each datastore, -inf where it holds no such token

    @property
    def perplexity(self) -> float:
        """Of the mixture; without a datastore that is the LM."""
        return perplexity(sum(self.log_probs) / len(self.log_probs))

    @property
    def lm_perplexity(self) -> float:
        """Of the LM alone."""
        return perplexity(sum(self.lm_log_probs) / len(self.lm_log_probs))


@dataclass
class TextNeighbor:
    """An entry of a datastore that was retrieved for the next token of a text."""

    token: str  # that followed there
    context: str  # the words before it
    distance: float
    share: float  # of p_kNN
    entry: int
    datastore: int  # its place among the datastores


class KNNLM:
    """A language model of fairseq with the datastores that it predicts with."""

    def __init__(self, scorer: TextScorer):
        self._scorer = scorer
        self._contexts: dict[int, Contexts] = {}

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        checkpoint_file: str = "checkpoint_best.pt",
        data_name_or_path: str | Path = ".",
        datastore: str | Path | list[str | Path] | None = None,
        **flags: Any,
    ) -> "KNNLM":
        """Load a checkpoint, with the arguments that fairseq's own ``from_pretrained`` takes.

        Args:
            model_name_or_path: folder of the checkpoint
            data_name_or_path: folder with dict.txt, relative to the checkpoint's folder or to this one
            datastore: one, or several
            flags: what ``fairseq-eval-lm`` calls ``--knn-NAME``: k=1024, temperature=10, index="auto", ...;
                lambda_=0.25, because lambda is a word of Python
        """
        set_up_fairseq()
        folder = Path(model_name_or_path)
        beside = folder / data_name_or_path
        data = beside if (beside / "dict.txt").exists() else Path(data_name_or_path)
        config = KNNLanguageModelingConfig(data=str(data))
        if datastore is not None:
            stores = datastore if isinstance(datastore, list) else [datastore]
            config.knn_datastore = ",".join(map(str, stores))
        for name, value in flags.items():
            flag = f"knn_{name.rstrip('_')}"
            if not hasattr(config, flag):
                raise KnnlmError(f"there is no flag --{flag.replace('_', '-')}; see the flags of fairseq-eval-lm")
            if flag in ("knn_lambda", "knn_k"):  # which are texts, since they may name several values, or all
                value = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            setattr(config, flag, value)
        return cls(load_text_scorer(folder / checkpoint_file, config))

    @property
    def model(self) -> FairseqLanguageModel:
        """The model of fairseq."""
        return self._scorer.model

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary of fairseq."""
        return self._scorer.dictionary

    def score(self, text: str) -> TextScores:
        """Score a text, whose words stand between blanks, and the end of each of its lines."""
        scores = self._scores(text)
        return TextScores(
            tokens=[self.dictionary[token] for token in scores.tokens.tolist()],
            lm_log_probs=scores.lm.tolist(),
            log_probs=scores.mixture.tolist(),
            memory_log_probs=[log_probs.tolist() for log_probs in scores.memories],
        )

    def sample(self, prompt: str, tokens: int = 40, topp: float = 0.9, seed: int | None = None) -> str:
        """Continue a text by up to so many tokens, sampled from the best ``topp`` of the mixture's mass."""
        if seed is not None:
            torch.manual_seed(seed)
        words = self.sample_words(self._scorer.encode(prompt)[:-1], tokens, topp)
        return " ".join([*prompt.split(), *words])

    @torch.no_grad()
    def sample_words(self, prompt: list[int], tokens: int, topp: float) -> list[str]:
        """The words that follow a prompt of tokens; of a prompt that is too long for the model, its end is used."""
        model = KNNLanguageModel(self.model, self._scorer.memories)
        limit = model.max_positions()
        prompt = prompt[-(limit - tokens - 2) :] if limit else prompt
        strategy = Sampling(self.dictionary, sampling_topp=topp)
        generator = SequenceGenerator(
            [model], self.dictionary, beam_size=1, max_len_a=0, max_len_b=len(prompt) + tokens, search_strategy=strategy
        )
        prefix = torch.tensor([prompt], device=self._scorer.device, dtype=torch.long)
        sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([len(prompt)])}}
        hypotheses = generator.generate(
            [model], sample, prefix_tokens=prefix if prompt else None, bos_token=self.dictionary.eos()
        )
        generated = hypotheses[0][0]["tokens"].tolist()[len(prompt) :]
        return [self.dictionary[token] for token in generated if token != self.dictionary.eos()]

    def neighbors(self, text: str, count: int = 8, context: int = 16) -> list[TextNeighbor]:
        """What was retrieved for the token that follows a text: the largest shares first."""
        if not self._scorer.memories:
            raise KnnlmError("there is no datastore to find neighbours in; give from_pretrained a datastore")
        scores = self._scores(text)
        found = []
        for number, memory in enumerate(self._scorer.memories):
            if number not in self._contexts:
                self._contexts[number] = Contexts(memory.datastore, self.dictionary)
            # The last query is the one that the end of the line was predicted from: the state after the whole text.
            (near,) = nearest_neighbors(memory, scores.queries[number][-1:], count)
            for neighbor in near:
                before = self._contexts[number].before(neighbor.entry, context)
                words = " ".join(self.dictionary[token] for token in before)
                token = self.dictionary[neighbor.token]
                found.append(TextNeighbor(token, words, neighbor.distance, neighbor.share, neighbor.entry, number))
        return sorted(found, key=lambda neighbor: -neighbor.share)[:count]

    def _scores(self, text: str) -> TokenScores:
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise KnnlmError("there is no text; give at least one word")
        return self._scorer.score([self._scorer.encode(line) for line in lines])
