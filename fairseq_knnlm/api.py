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

from .data.text_encoding import make_text_encoder
from .errors import KnnlmError
from .fairseq_setup import set_up_fairseq
from .memory.contexts import Contexts
from .memory.nearest import nearest_neighbors
from .mixture.generation import KNNLanguageModel
from .mixture.interpolation import perplexity
from .mixture.scoring import TokenScores
from .mixture.text import TextScorer
from .models.hf_loading import HFFolder
from .tasks.config import KNNLanguageModelingConfig
from .tasks.loading import load_text_scorer


@dataclass
class TextScores:
    """The tokens of a text and what the LM, the memories and the mixture say of them (natural logarithms)."""

    tokens: list[str]
    lm_log_probs: list[float]
    log_probs: list[float]  # of the mixture
    # of each datastore, then of each head; -inf where it holds no such token
    memory_log_probs: list[list[float]] = field(repr=False)
    weights: list[list[float]] | None = field(default=None, repr=False)  # lambdas of each token, with a gate

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
    weight: float = 1.0  # how much the entry counts; see knnlm prune


class KNNLM:
    """A language model of fairseq with the datastores and heads that it predicts with."""

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
        head: str | Path | list[str | Path] | None = None,
        tokenizer: str | None = None,
        bpe: str | None = None,
        **flags: Any,
    ) -> "KNNLM":
        """Load a checkpoint, with the arguments that fairseq's own ``from_pretrained`` takes.

        Args:
            model_name_or_path: folder of the checkpoint, or of a model of Hugging Face, which needs nothing else
            checkpoint_file: in that folder; of a quantised model of Hugging Face the GGUF file
            data_name_or_path: folder with dict.txt, relative to the checkpoint's folder or to this one
            datastore: one, or several
            head: that knnlm learn trained: one, or several
            tokenizer, bpe: names of fairseq, where texts are not tokenised yet; their own flags go with the others:
                bpe="sentencepiece", sentencepiece_model="spm.model"
            flags: what ``fairseq-eval-lm`` calls ``--knn-NAME``, with the same defaults: k=1024, temperature=10,
                index="auto", preset="paper", gate="file", ...; lambda_=0.25, because lambda is a word of Python
        """
        set_up_fairseq()
        folder = Path(model_name_or_path)
        path = folder / checkpoint_file
        if HFFolder.at(folder) and not path.is_file():
            path = folder
        beside = folder / data_name_or_path
        data = beside if (beside / "dict.txt").exists() else Path(data_name_or_path)
        needs_data = HFFolder.at(path) is None or (data / "dict.txt").exists()
        config = KNNLanguageModelingConfig(data=str(data) if needs_data else None)
        if datastore is not None:
            stores = datastore if isinstance(datastore, list) else [datastore]
            config.knn_datastore = ",".join(map(str, stores))
        if head is not None:
            heads = head if isinstance(head, list) else [head]
            config.knn_head = ",".join(map(str, heads))
        encoder_flags: list[str] = []
        for name, value in flags.items():
            flag = f"knn_{name.rstrip('_').removeprefix('knn_')}"
            if not hasattr(config, flag):
                if tokenizer or bpe:
                    encoder_flags += [f"--{name.replace('_', '-')}", str(value)]
                    continue
                raise KnnlmError(f"there is no flag --{flag.replace('_', '-')}; see the flags of fairseq-eval-lm")
            # texts: they may name several values, or all
            if flag in ("knn_lambda", "knn_temperature", "knn_k", "knn_head_lambda"):
                value = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            setattr(config, flag, value)
        encoder = make_text_encoder(tokenizer, bpe, encoder_flags) if tokenizer or bpe else None
        return cls(load_text_scorer(path, config, encoder))

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
            tokens=[self._scorer.text.show(token) for token in scores.tokens.tolist()],
            lm_log_probs=scores.lm.tolist(),
            log_probs=scores.mixture.tolist(),
            memory_log_probs=[log_probs.tolist() for log_probs in scores.memories],
            weights=None if scores.weights is None else scores.weights.tolist(),
        )

    def sample(self, prompt: str, tokens: int = 40, topp: float = 0.9, seed: int | None = None) -> str:
        """Continue a text by up to so many tokens, sampled from the best ``topp`` of the mixture's mass."""
        if seed is not None:
            torch.manual_seed(seed)
        text = self._scorer.text
        return text.continued(prompt, self.sample_tokens(text.prompt(prompt), tokens, topp))

    @torch.no_grad()
    def sample_tokens(self, prompt: list[int], tokens: int, topp: float) -> list[int]:
        """The tokens that follow a prompt of tokens; of a prompt that is too long for the model, its end is used."""
        model = KNNLanguageModel(self.model, self._scorer.memories, self._scorer.gate)
        limit = model.max_positions()
        prompt = prompt[-(limit - tokens - 2) :] if limit else prompt
        strategy = Sampling(self.dictionary, sampling_topp=topp)
        generator = SequenceGenerator(
            [model], self.dictionary, beam_size=1, max_len_a=0, max_len_b=len(prompt) + tokens,
            search_strategy=strategy, eos=self._scorer.text.end,
        )  # fmt: skip
        prefix = torch.tensor([prompt], device=self._scorer.device, dtype=torch.long)
        sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([len(prompt)])}}
        hypotheses = generator.generate(
            [model], sample, prefix_tokens=prefix if prompt else None, bos_token=self.dictionary.eos()
        )
        return hypotheses[0][0]["tokens"].tolist()[len(prompt) :]

    def neighbors(self, text: str, count: int = 8, context: int = 16) -> list[TextNeighbor]:
        """What was retrieved for the token that follows a text: the largest shares first."""
        if not self._scorer.datastores:
            raise KnnlmError("there is no datastore to find neighbours in; give from_pretrained a datastore")
        form = self._scorer.text
        if not text.strip():
            raise KnnlmError("there is no text; give at least one word")
        last = text if form.has_own_tokenizer else [line for line in text.splitlines() if line.strip()][-1]
        scores = self._scorer.score([[*form.prompt(last), form.end]])
        found = []
        for number, memory in enumerate(self._scorer.datastores):
            if number not in self._contexts:
                self._contexts[number] = Contexts(memory.datastore, self.dictionary)
            # The last query is the one that the end was predicted from: the state after the whole text.
            (near,) = nearest_neighbors(memory, scores.queries[number][-1:], count)
            for neighbor in near:
                before = self._contexts[number].before(neighbor.entry, context)
                words, token = form.passage(before), form.show(neighbor.token)
                facts = (neighbor.distance, neighbor.share, neighbor.entry, number, neighbor.weight)
                found.append(TextNeighbor(token, words, *facts))
        return sorted(found, key=lambda neighbor: -neighbor.share)[:count]

    def _scores(self, text: str) -> TokenScores:
        sequences = self._scorer.text.sequences(text)
        if not sequences:
            raise KnnlmError("there is no text; give at least one word")
        return self._scorer.score(sequences)
