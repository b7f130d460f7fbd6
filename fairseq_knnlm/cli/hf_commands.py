"""``knnlm hf``: text for a model of Hugging Face."""

import argparse
from pathlib import Path

from .parsing import CommandParser


def add_hf_commands(parser: CommandParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    help = "binarise text with the tokenizer of a causal LM of Hugging Face, and write the checkpoint that points to it"
    prepare = commands.add_parser("prepare", help=help, description=help[0].upper() + help[1:] + ".")
    prepare.set_defaults(run=_prepare, parser=prepare)
    prepare.add_argument("model", metavar="MODEL_DIR", help="folder with config.json, tokenizer.json, *.safetensors")
    prepare.add_argument("--gguf", metavar="FILE", help="a GGUF file in that folder, instead of these three")
    prepare.add_argument("--trainpref", metavar="FILE", help="raw text, UTF-8, of which the split train is made")
    prepare.add_argument("--validpref", metavar="FILE", help="of valid")
    prepare.add_argument("--testpref", metavar="FILE", help="of test")
    prepare.add_argument("--destdir", required=True, metavar="DIR", help="the data folder to create")
    prepare.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
        help="what the weights are loaded as (default: %(default)s; the others are for GPUs)",
    )  # fmt: skip


def _prepare(args: argparse.Namespace) -> int:
    from ..models.hf_data import prepare
    from ..models.hf_loading import POINTER, HFFolder
    from ..report.tables import table

    texts = {"train": args.trainpref, "valid": args.validpref, "test": args.testpref}
    place = HFFolder(Path(args.model), args.gguf)
    sizes = prepare(place, {split: text for split, text in texts.items() if text}, args.destdir, args.dtype)
    header = ["split", "lines", "tokens", "words", "bytes", "tokens per word"]
    rows = [
        [split, *(f"{size[fact]:,}" for fact in ("lines", "tokens", "words", "bytes")),
         f"{size['tokens'] / max(1, size['words']):.2f}"]
        for split, size in sizes.items()
    ]  # fmt: skip
    print(table(header, rows))
    print(f"\nnow: fairseq-eval-lm {args.destdir} --path {args.destdir}/{POINTER} --user-dir $(knnlm user-dir) "
          "--task knn_language_modeling ...")  # fmt: skip
    return 0
