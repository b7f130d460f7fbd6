"""What the commands share that load a model and read raw text: its flags, and loading it."""

import argparse
import sys
from dataclasses import Field, fields
from enum import EnumMeta
from typing import TYPE_CHECKING, Any, get_args

from .parsing import CommandParser

if TYPE_CHECKING:
    from ..mixture.text import TextScorer

# The flags of the task that have a meaning here; their defaults and help are taken from there.
FLAGS = (
    "knn_preset", "knn_index", "knn_k", "knn_lambda", "knn_temperature", "knn_nprobe", "knn_far", "knn_device",
    "knn_engine", "knn_ray_address", "knn_metric", "knn_mask", "knn_score", "knn_head", "knn_head_lambda", "knn_gate",
    "knn_gate_skip",
)  # fmt: skip


def add_model_arguments(parser: CommandParser, datastore_flag: str, required: bool) -> None:
    """What a command needs to load a model with its memories."""
    from ..tasks.config import KNNLanguageModelingConfig

    parser.takes_encoder_flags = True
    parser.add_argument(
        "--path", required=True, metavar="CHECKPOINT", help="of fairseq; or a Hugging Face folder, or a GGUF file"
    )
    parser.add_argument(
        "--data", metavar="DATA", help="folder with the model's dict.txt; a Hugging Face folder needs none"
    )
    parser.add_argument(
        datastore_flag, dest="knn_datastore", required=required, metavar="DIR[,DIR...]", help="datastores to mix in"
    )
    settings = {field.name: field for field in fields(KNNLanguageModelingConfig)}
    for name in FLAGS:
        field = settings[name]
        default = str(field.default) if field.default is not None else None
        choices = [str(choice.value) for choice in field.type] if isinstance(field.type, EnumMeta) else None
        flag, text = f"--{name.replace('_', '-')}", field.metadata["help"]
        text += "" if default is None else f" (default: {default})"
        parser.add_argument(flag, type=_kind_of(field), default=default, choices=choices, help=text)
    parser.add_argument(
        "--tokenizer", metavar="NAME",
        help="tokenise the text first, with fairseq's moses, nltk or space (default: it is tokenised)",
    )  # fmt: skip
    parser.add_argument(
        "--bpe", metavar="NAME",
        help="then split words, with fairseq's sentencepiece, subword_nmt, fastbpe, gpt2, characters, ...; its own "
        "flags (--sentencepiece-model, --bpe-codes, ...) are those of fairseq-interactive",
    )  # fmt: skip
    parser.add_argument("--lang", default="en", help="of the tokenizer moses (default: %(default)s)")


def _kind_of(field: "Field[Any]") -> type:
    """What the text of a flag is turned into: the X of a field of type X or Optional[X]."""
    kinds = {field.type, *get_args(field.type)}
    return next((kind for kind in (int, float) if kind in kinds), str)


def hint(lm: float, mixture: float) -> None:
    """Say what to do where the mixture's perplexity is worse than the LM's."""
    from ..mixture.totals import worse_than_lm

    if text := worse_than_lm(lm, mixture):
        print(text, file=sys.stderr)


def load(args: argparse.Namespace) -> "TextScorer":
    """The model, its memories and how it reads text, as the flags say."""
    from ..data.text_encoding import make_text_encoder
    from ..tasks.config import KNNLanguageModelingConfig
    from ..tasks.loading import load_text_scorer

    encoder = None
    if args.tokenizer or args.bpe:
        encoder = make_text_encoder(args.tokenizer, args.bpe, args.encoder_flags, args.lang)
    config = KNNLanguageModelingConfig(data=args.data)
    for name in (*FLAGS, "knn_datastore"):
        setattr(config, name, getattr(args, name))
    return load_text_scorer(args.path, config, encoder)
