"""Loading a checkpoint with its dictionary and its memories outside of the fairseq commands."""

import pickle
from pathlib import Path

import torch
from fairseq import checkpoint_utils

from ..data.dictionaries import dictionary_facts
from ..errors import KnnlmError
from ..keys import Model, check_model, key_dimension, resolve_layer, weights_fingerprint
from ..memory import DatastoreMemory
from ..memory.opening import open_datastores
from ..mixture.text import TextScorer
from ..models import spalm_lm  # noqa: F401  registers spalm_lm and transformer_xl_lm, which a checkpoint may name
from ..original.importer import ModelFacts
from .config import KNNLanguageModelingConfig
from .knn_language_modeling import KNNLanguageModelingTask


def load_model(path: str | Path, config: KNNLanguageModelingConfig) -> tuple[KNNLanguageModelingTask, Model]:
    """The task and the model of a checkpoint, ready for scoring, on a GPU if there is one."""
    try:
        task = KNNLanguageModelingTask.setup_task(config)
    except (OSError, RuntimeError) as error:
        raise KnnlmError(
            f"{config.data} has no readable dict.txt ({error}); give the binarised data's folder"
        ) from error
    if not Path(path).is_file():
        raise KnnlmError(f"there is no checkpoint {path}; give a file that fairseq-train wrote")
    try:
        (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], task=task)
    except Exception as error:  # a file that is no checkpoint, or of another model, makes fairseq raise nearly anything
        reason = " ".join(str(error).split())
        if isinstance(error, pickle.UnpicklingError):  # whose advice is to switch the safety off
            reason = "it is no checkpoint, or holds objects that could run code"
        raise KnnlmError(
            f"{path} cannot be loaded as a checkpoint of this data ({reason:.200}); give a file that fairseq-train "
            "wrote, and the data that it was trained on"
        ) from error
    if torch.cuda.is_available():
        model = model.cuda()
    model.eval()
    return task, model


def load_text_scorer(path: str | Path, config: KNNLanguageModelingConfig) -> TextScorer:
    """The model and the memories that the config asks for, checked as fairseq-eval-lm checks them."""
    task, model = load_model(path, config)
    memories: list[DatastoreMemory] = []
    if config.knn_datastore:
        memories = open_datastores(config, model, dictionary_facts(task.target_dictionary))
    return TextScorer(model, task.target_dictionary, memories)


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
