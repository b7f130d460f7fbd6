"""A sentence encoder of Hugging Face that lies on the disk, as an alternative to an LM's states (``knnlm embed``)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.hf_tokenizer import import_transformers, one_line
from ..errors import KnnlmError
from ..progress import progress
from .hf_loading import HFFolder

ROWS = 64  # sentences that are read at once
POOLING = Path("1_Pooling") / "config.json"  # where sentence-transformers writes how states become one vector


@torch.no_grad()
def encode_sentences(place: HFFolder, sentences: Sequence[Sequence[str]]) -> np.ndarray:
    """The words of n sentences -> (n, dim) float32, by the encoder and the pooling of a folder."""
    place.check()
    takes_first, (tokenizer, model) = _takes_first(place.folder), _load(place)
    texts = [" ".join(_as_written(words, tokenizer.unk_token)) for words in sentences]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    longest = tokenizer.model_max_length
    limit = min(longest, getattr(model.config, "max_position_embeddings", longest))
    result = np.empty((len(texts), model.config.hidden_size), np.float32)
    with progress("embedding", len(order), " sentences") as bar:
        for start in range(0, len(order), ROWS):
            numbers = order[start : start + ROWS]
            batch = tokenizer([texts[number] for number in numbers], padding=True, return_tensors="pt")
            if batch["input_ids"].size(1) > limit:
                raise KnnlmError(
                    f"the encoder reads {limit} tokens and a sentence has more; leave it out, or use another encoder"
                )
            states = model(**batch).last_hidden_state
            result[numbers] = states[:, 0] if takes_first else _mean(states, batch["attention_mask"])
            bar.update(len(numbers))
    return result


def _mean(states: Tensor, present: Tensor) -> Tensor:
    """(n, T, dim), (n, T) -> (n, dim)."""
    weights = (present / present.sum(dim=1, keepdim=True)).to(states)
    return torch.einsum("ntc,nt->nc", states, weights)


def _as_written(words: Sequence[str], unknown: str | None) -> list[str]:
    """Words as the encoder knows them: the unknown one is its own, and a hyphen is no longer marked."""
    names = {"<unk>": unknown or "", "@-@": "-"}
    return [names.get(word, word) for word in words]


def _takes_first(folder: Path) -> bool:
    """Whether an embedding is the state of the first token instead of the mean over all."""
    if not (folder / POOLING).is_file():
        return False
    try:
        modes = json.loads((folder / POOLING).read_text(encoding="utf-8"))
        chosen = {name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True}
    except (ValueError, AttributeError, OSError) as error:
        raise KnnlmError(f"{folder / POOLING} cannot be read ({one_line(error)}); get the encoder again") from error
    if chosen not in ({"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
        raise KnnlmError(
            f"{folder} pools its states in a way that is not supported ({', '.join(sorted(chosen)) or 'none'}); use an "
            "encoder that takes their mean or the first one, or give your own --array"
        )
    return chosen == {"pooling_mode_cls_token"}


def _load(place: HFFolder) -> tuple[Any, Any]:
    """Tokenizer and model, with all of the weights that states are computed from."""
    transformers = import_transformers()
    folder = str(place.folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, info = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # transformers raises nearly anything for a file that is something else
        raise KnnlmError(f"{folder} cannot be read as a sentence encoder ({one_line(error)})") from error
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith("pooler.")):
        raise KnnlmError(
            f"the weights in {folder} lack {missing[0]} and {len(missing) - 1} more; get the whole encoder again"
        )
    if getattr(tokenizer, "pad_token", None) is None:
        raise KnnlmError(f"the tokenizer in {folder} has no token for padding; use a sentence encoder")
    return tokenizer, model.eval()
