"""Any causal LM of Hugging Face as a model of fairseq: features and output layer apart, and its own cache."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel, register_model
from torch import Tensor

from ..data.dictionaries import dictionary_facts
from ..data.hf_tokenizer import OFFSET, HFTokenizer, import_transformers
from ..errors import KnnlmError
from .hf_loading import HFFolder, keeps_nothing, layers_and_norm

CACHE = "hugging_face_cache"  # its place in fairseq's incremental state


def _help(text: str) -> dict:
    return {"help": text}


@dataclass
class HFCausalLMConfig(FairseqDataclass):
    model_dir: str = field(default="", metadata=_help("folder with config.json, tokenizer.json and *.safetensors"))
    gguf: Optional[str] = field(default=None, metadata=_help("a GGUF file in that folder, instead of these three"))
    dtype: str = field(default="float32", metadata=_help("of the weights: float32, float16 or bfloat16"))
    fingerprint: Optional[str] = field(default=None, metadata=_help("of the folder when its data was prepared"))


class HFDecoder(FairseqIncrementalDecoder):
    """A causal LM of transformers in the form of a decoder of fairseq. Tokens are those of the dictionary."""

    batch_first = True  # states are B x T x C, in fairseq's own decoders T x B x C
    separate_output_layer = True
    limits_context = True  # a block and the context before it must fit into the positions together

    def __init__(self, model: Any, dictionary: Dictionary, start: int):
        """
        Args:
            model: of transformers
            start: the id of the token that a text begins with, which fairseq calls </s>
        """
        super().__init__(dictionary)
        self.model, self._start = model, start
        self.embed_dim = model.config.hidden_size
        self.keeps_nothing = keeps_nothing(model.config)
        # In a tuple, because a module that is an attribute of two modules would have its parameters twice.
        self.key_family, *self._parts = layers_and_norm(model)

    @property
    def layers(self) -> Any:
        return self._parts[0]

    @property
    def layer_norm(self) -> Any:
        """After the last layer; None where there is none."""
        return self._parts[1]

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: dict[str, Any] | None = None,
        src_lengths: Tensor | None = None,
        features_only: bool = False,
    ) -> tuple[Tensor, None]:
        """Tokens (B, T) -> logits (B, T, V), or features (B, T, C); of the tokens that are new to incremental_state."""
        features = self.extract_features(prev_output_tokens, incremental_state)
        return features if features_only else self.output_layer(features), None

    def extract_features(self, tokens: Tensor, incremental_state: dict[str, Any] | None = None) -> Tensor:
        """(B, T) -> (B, T, C). Rows may be padded at their end, which no token before it looks at."""
        ids = torch.where(tokens < OFFSET, self._start, tokens - OFFSET)
        if incremental_state is None:  # a beam search tries any symbol where a prompt forbids all but one
            self._check(tokens)
            return self.model.base_model(ids, use_cache=False).last_hidden_state
        cache = incremental_state.get(CACHE)
        if cache is None:
            cache = incremental_state[CACHE] = import_transformers().DynamicCache(config=self.model.config)
        new = ids[:, cache.get_seq_length() :]
        return self.model.base_model(new, past_key_values=cache, use_cache=True).last_hidden_state

    def _check(self, tokens: Tensor) -> None:
        """fairseq's own ends of lines and unknown words are no tokens of the model."""
        strange = (tokens[:, 1:] == self.dictionary.eos()).any() | (tokens == self.dictionary.unk()).any()
        if strange:
            raise KnnlmError(
                "the text has fairseq's ends of lines or unknown words in it, which the model knows nothing of; make "
                "the data with knnlm hf prepare, and use --task knn_language_modeling"
            )

    def output_layer(self, features: Tensor, **_: Any) -> Tensor:
        """(..., C) -> logits (..., V); fairseq's four special symbols have no probability."""
        return F.pad(self.model.get_output_embeddings()(features), (OFFSET, 0), value=-torch.inf)

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Beam search goes on with these rows."""
        if CACHE in incremental_state:
            incremental_state[CACHE].reorder_cache(new_order)

    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings


@register_model("hf_causal_lm", dataclass=HFCausalLMConfig)
class HFCausalLM(FairseqLanguageModel):
    """A causal LM of Hugging Face with its tokenizer."""

    def __init__(self, decoder: HFDecoder, text: HFTokenizer):
        super().__init__(decoder)
        self.text = text

    @classmethod
    def build_model(cls, cfg: HFCausalLMConfig, task: Any) -> "HFCausalLM":
        """From what a pointer of ``knnlm hf prepare`` says."""
        place = HFFolder(Path(cfg.model_dir), cfg.gguf)
        if not place.folder.is_dir():
            raise KnnlmError(
                f"the model that --path points to is not in {cfg.model_dir} any more; put it back, or run knnlm hf "
                "prepare again"
            )
        if cfg.fingerprint and place.fingerprint() != cfg.fingerprint:
            raise KnnlmError(
                f"the model in {place.folder} is another than the data was prepared with; put that one back, or run "
                "knnlm hf prepare again"
            )
        return cls.of_folder(place, task.target_dictionary, cfg.dtype)

    @classmethod
    def of_folder(cls, place: HFFolder, dictionary: Dictionary | None = None, dtype: str = "float32") -> "HFCausalLM":
        """The model in a folder.

        Args:
            dictionary: of the data that it is to be used with, which must be its own; None: there is no data
        """
        config = place.config()
        tokenizer = place.tokenizer(config)
        own = tokenizer.dictionary()
        if dictionary is not None and dictionary_facts(own) != dictionary_facts(dictionary):
            raise KnnlmError(
                f"the data has a dictionary of {len(dictionary):,} types, which is not that of the tokenizer in "
                f"{place.folder} ({len(own):,} types); make the data with knnlm hf prepare {place.folder}"
            )
        decoder = HFDecoder(place.model(config, dtype), dictionary or own, tokenizer.start)
        return cls(decoder, tokenizer)

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None) -> Any:
        """A pointer has no weights: they have been read from the model's own folder."""
        if state_dict:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        return None
