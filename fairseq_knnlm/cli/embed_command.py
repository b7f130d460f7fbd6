"""``knnlm embed``: the sentence embeddings that prototypes are retrieved by."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import KnnlmError
from ..storage import file_sha256
from .parsing import Add


def add_embed_command(add_command: Add) -> None:
    help = "embeddings of the sentences of a split, by which prototypes are retrieved"
    command = add_command("embed", embed, help)
    add = command.add_argument
    add("--data", required=True, metavar="DATA", help="binarised sentences, one to a line")
    add("--split", default="train", help="(default: %(default)s)")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--path", metavar="CHECKPOINT", help="an LM: the mean of its states over the words")
    source.add_argument("--encoder", metavar="DIR", help="or a sentence encoder of Hugging Face in a folder")
    source.add_argument("--array", metavar="FILE", help="or your own: a .npy file with one row per sentence")
    add("--key", default="ffn_input_ln", help="which state of the LM, as for a datastore (default: %(default)s)")
    add("--layer", type=int, help="of the LM; negative counts from the end (default: the last)")
    add("--longest-sentence", type=int, default=64, metavar="N", help="tokens; more are refused (default: %(default)s)")
    add("-o", "--output", required=True, metavar="DIR", help="the folder of this split: DIR/train, DIR/valid, ...")


def embed(args: argparse.Namespace) -> int:
    from fairseq.data import Dictionary

    from ..data.dictionaries import dictionary_facts
    from ..data.sentences import load_sentences
    from ..data.splits import check_dictionary_exists
    from ..prototypes.embeddings import FACTS, write_embeddings

    folder = Path(args.output)
    if folder.is_dir() and any(folder.iterdir()) and not any(folder.glob(f"{FACTS}*")):
        raise KnnlmError(f"{folder} is not empty; choose another -o")
    check_dictionary_exists(args.data)
    dictionary = Dictionary.load(str(Path(args.data) / "dict.txt"))
    sentences = load_sentences(args.data, args.split, dictionary, args.longest_sentence)
    if args.array:
        array, source = _given(args)
    elif args.encoder:
        array, source = _encoded(args, sentences, dictionary)
    else:
        array, source = _states(args, sentences, dictionary)
    digest = dictionary_facts(dictionary)["dictionary_sha256"]
    facts = write_embeddings(folder, array, sentences, digest, {"split": args.split, **source})
    print(f"{folder}: {facts.sentences:,} sentences of {args.split}, {facts.dim} dimensions")
    return 0


def _given(args: argparse.Namespace) -> tuple[np.ndarray, dict[str, Any]]:
    path = Path(args.array)
    try:
        array = np.load(path, allow_pickle=False)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"its numbers are {array.dtype}")
    except (OSError, ValueError, EOFError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise KnnlmError(f"{path} cannot be read as an array ({reason:.100}); give a .npy file of numbers") from error
    return array, {"array": path.name, "array_file_sha256": file_sha256(path)}


def _encoded(args: argparse.Namespace, sentences: Any, dictionary: Any) -> tuple[np.ndarray, dict[str, Any]]:
    from ..models.hf_loading import HFFolder
    from ..models.hf_sentence_encoder import encode_sentences

    place = HFFolder(Path(args.encoder))
    words = [sentences.text(number, dictionary).split() for number in range(len(sentences))]
    array = encode_sentences(place, words)
    return array, {"encoder": place.folder.name, "weights_sha256": [file_sha256(path) for path in place.weights()]}


def _states(args: argparse.Namespace, sentences: Any, dictionary: Any) -> tuple[np.ndarray, dict[str, Any]]:
    from ..keys import KEYS, resolve_layer, weights_fingerprint
    from ..prototypes.sentence_states import mean_states
    from ..tasks.config import KNNLanguageModelingConfig
    from ..tasks.loading import load_model

    if args.key not in KEYS:
        raise KnnlmError(f"there is no key {args.key}; choose one of {', '.join(KEYS)}")
    _, model = load_model(args.path, KNNLanguageModelingConfig(data=args.data))
    layer = resolve_layer(model.decoder, args.layer)
    limit = model.max_positions()
    if limit is not None and int(sentences.lengths.max()) > limit:
        raise KnnlmError(f"the LM reads {limit} tokens and a sentence has more; leave it out, or use another LM")
    array = mean_states(model, args.key, layer, sentences, dictionary.eos(), dictionary.pad())
    return array, {"key": args.key, "layer": layer, "checkpoint_sha256": weights_fingerprint(model)}
