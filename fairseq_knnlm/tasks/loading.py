"""Loading a checkpoint with its dictionary and its memories outside of the fairseq commands."""

from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils

from ..data.text_encoding import DictionaryText, TextEncoder
from ..errors import KnnlmError
from ..keys import Model, check_model, key_dimension, resolve_layer, weights_fingerprint
from ..mixture.text import TextScorer
from ..models import spalm_lm  # noqa: F401  registers spalm_lm and transformer_xl_lm, which a checkpoint may name
from ..models.hf_causal_lm import HFCausalLM
from ..models.hf_loading import HFFolder
from ..original.importer import ModelFacts
from .checkpoint_errors import one_sentence_for
from .config import KNNLanguageModelingConfig
from .gating import open_mixture
from .knn_language_modeling import KNNLanguageModelingTask


def load_model(path: str | Path, config: KNNLanguageModelingConfig) -> tuple[KNNLanguageModelingTask, Model]:
    """The task and the model of a checkpoint or of a Hugging Face folder, on a GPU if there is one."""
    task, model = _load_folder(place, config) if (place := HFFolder.at(path)) else _load_checkpoint(path, config)
    if torch.cuda.is_available():
        model = model.cuda()
    model.eval()
    return task, model


def _load_folder(place: HFFolder, config: KNNLanguageModelingConfig) -> tuple[KNNLanguageModelingTask, Any]:
    """A model of Hugging Face as it is, with data or without."""
    dictionary = KNNLanguageModelingTask.setup_task(config).dictionary if config.data else None
    model = HFCausalLM.of_folder(place, dictionary)
    task = KNNLanguageModelingTask(config, model.decoder.dictionary)
    task.models = [model]
    return task, model


def _load_checkpoint(path: str | Path, config: KNNLanguageModelingConfig) -> tuple[KNNLanguageModelingTask, Any]:
    if not config.data:
        raise KnnlmError(f"{path} needs the folder of its dictionary; give --data (a Hugging Face folder needs none)")
    try:
        task = KNNLanguageModelingTask.setup_task(config)
    except (OSError, RuntimeError) as error:
        raise KnnlmError(
            f"{config.data} has no readable dict.txt ({error}); give the binarised data's folder"
        ) from error
    with one_sentence_for(path, "give a file that fairseq-train wrote, and the data that it was trained on"):
        (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    return task, model


def load_text_scorer(
    path: str | Path, config: KNNLanguageModelingConfig, encoder: TextEncoder | None = None
) -> TextScorer:
    """The model and the memories that the config asks for, checked as fairseq-eval-lm checks them.

    Args:
        encoder: of raw text, where --tokenizer or --bpe are given; None: neither is
    """
    task, model = load_model(path, config)
    text = task.text
    if encoder is not None:
        if text.has_own_tokenizer:
            raise KnnlmError("the model has a tokenizer of its own; leave out --tokenizer and --bpe")
        text = DictionaryText(task.target_dictionary, encoder)
    memories, gate = open_mixture(config, model, task.target_dictionary)
    return TextScorer(model, task.target_dictionary, memories, gate, text)


def read_model(path: str, dictionary: str, layer: int) -> ModelFacts:
    """What the model that made a datastore tells about its keys.

    Args:
        dictionary: path of dict.txt; fairseq finds it by its folder
        layer: that the keys are of; negative counts from the end
    """
    if Path(dictionary).name != "dict.txt":
        raise KnnlmError(f"--path needs a dictionary that is called dict.txt, not {dictionary}; rename or copy it")
    _, model = load_model(path, KNNLanguageModelingConfig(data=str(Path(dictionary).parent)))
    check_model(model)
    return ModelFacts(key_dimension(model), resolve_layer(model.decoder, layer), weights_fingerprint(model))
