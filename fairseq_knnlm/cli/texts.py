"""``knnlm inspect``: a page that shows what was retrieved for each token of a text."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import KnnlmError
from ..storage import write_text
from .model_flags import add_model_arguments, hint, load
from .parsing import Add, CommandParser

if TYPE_CHECKING:
    from fairseq.data import Dictionary

    from ..inspector.collect import Inspector

logger = logging.getLogger(__name__)


def add_text_commands(add: Add) -> None:
    help = "a page that shows what was retrieved for each token of a text"
    add("inspect", inspect, help, fill=_add_inspect_arguments)


def _add_inspect_arguments(parser: CommandParser) -> None:
    add_model_arguments(parser, "--datastore", required=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="what to look at")
    source.add_argument("--split", help="look at a split of DATA, from --from on")
    source.add_argument("--serve", action="store_true", help="a live page instead of a file: type, score, continue")
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="first token of the split")
    parser.add_argument("--tokens", type=int, default=500, metavar="M", help="how many (default: %(default)s)")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="(default: %(default)s)")
    parser.add_argument(
        "--key-lm", metavar="CHECKPOINT",
        help="where --path is a SPALM: the frozen LM that made --datastore, whose neighbours SPALM reads",
    )  # fmt: skip
    parser.add_argument("--segment", type=int, default=512, help="of a SPALM, as in training (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="of --serve; any other lets the network in")
    parser.add_argument("--port", type=int, default=8765, help="of --serve (default: %(default)s)")


def inspect(args: argparse.Namespace) -> int:
    from ..inspector.collect import Inspector
    from ..inspector.page import build_page

    if not (args.knn_datastore or args.knn_head):
        raise KnnlmError("there is nothing to look into; give --datastore DIR or --knn-head HEAD")
    if args.text is not None and not args.text.strip():
        raise KnnlmError("--text is empty; give at least one word")
    if args.split and not args.data:
        raise KnnlmError("--split is a split of --data; give that, too")
    if args.split and (args.start < 0 or args.tokens < 1):
        raise KnnlmError("--from must be 0 or more and --tokens 1 or more")
    if args.key_lm:
        return _inspect_spalm(args)
    scorer = load(args)
    inspector = Inspector.of(scorer, checkpoint=args.path)
    if args.serve:
        return _serve(inspector, args)
    if args.split:
        limit = scorer.model.max_positions() or 512
        sequences, context, total = _split_tokens(args, scorer.dictionary, limit // 2)
        last = args.start + len(sequences[0]) - context - 1
        data = inspector.inspect(sequences, context, split=args.split, first=args.start, last=last, total=total)
    else:
        sequences = scorer.text.sequences(args.text)
        if unknown := scorer.unknown_words(sequences):
            logger.warning(unknown)
        data = inspector.inspect(sequences)
    write_text(args.output, build_page(data))
    about = data["about"]
    print(f"{args.output}: {len(data['tokens']):,} tokens, perplexity {about['lm']:.2f} LM, {about['mix']:.2f} kNN-LM")
    hint(about["lm"], about["mix"])
    return 0


def _inspect_spalm(args: argparse.Namespace) -> int:
    """A page of a SPALM with its gate and its neighbours."""
    from ..inspector.page import build_page
    from ..inspector.spalm_collect import SPALMInspector
    from ..tasks.spalm_generation import load_spalm

    if args.serve:
        raise KnnlmError("--serve is for kNN-LMs; look at a SPALM with --text or --split")
    if not (args.data and args.knn_datastore):
        raise KnnlmError("a SPALM needs --data, the folder of its dict.txt, and --datastore; give both")
    if args.segment < 1:
        raise KnnlmError(f"--segment must be 1 or more, not {args.segment}")
    model, neighbors = load_spalm(args)
    inspector = SPALMInspector(model.decoder, neighbors, model.decoder.dictionary, args.segment)
    if args.split:
        before = model.decoder.reach(args.segment) + args.segment
        ((tokens,), context, total) = _split_tokens(args, model.decoder.dictionary, before)
        last = args.start + len(tokens) - context - 1
        place = {"split": args.split, "first": args.start, "last": last, "total": total}
        data = inspector.inspect(tokens, context, checkpoint=args.path, **place)
    else:
        from ..data.text_encoding import DictionaryText

        text = [token for line in DictionaryText(model.decoder.dictionary).sequences(args.text) for token in line]
        data = inspector.inspect(text, checkpoint=args.path)
    write_text(args.output, build_page(data))
    about = data["about"]
    print(
        f"{args.output}: {len(data['tokens']):,} tokens, perplexity {about['lm']:.2f} without neighbours, "
        f"{about['mix']:.2f} SPALM"
    )
    return 0


def _split_tokens(
    args: argparse.Namespace, dictionary: "Dictionary", before: int
) -> tuple[list[list[int]], int, int]:
    """Tokens of a split with up to so many before them; how many of these there are; and how many the split has."""
    from fairseq.data import data_utils

    path = Path(args.data) / args.split
    lines = data_utils.load_indexed_dataset(str(path), dictionary)
    if lines is None:
        raise KnnlmError(f"there is no split {path}; run fairseq-preprocess, or choose another --split")
    total = int(lines.sizes.sum())
    if args.start >= total:
        raise KnnlmError(f"the split has {total:,} tokens, so --from {args.start:,} is behind its end; use less")
    begin = max(0, args.start - before)
    stop = min(args.start + args.tokens, total)
    ends = np.cumsum(lines.sizes)
    first, last = np.searchsorted(ends, [begin, stop - 1], side="right")
    tokens = [token for number in range(first, last + 1) for token in lines[number].tolist()]
    offset = int(ends[first] - lines.sizes[first])
    return [tokens[begin - offset : stop - offset]], args.start - begin, total


def _serve(inspector: "Inspector", args: argparse.Namespace) -> int:
    from ..inspector.examples import example_texts
    from ..inspector.server import LiveInspector, make_server

    # With a tokenizer the page takes raw text, and lines of the data are not raw.
    raw = args.tokenizer or args.bpe or not args.data
    examples = [] if raw else example_texts(args.data, inspector.scorer.dictionary, inspector.scorer.text)
    server = make_server(LiveInspector(inspector), args.host, args.port, examples)
    server.catch_signals()
    host, port = server.server_address[:2]
    print(f"http://{host}:{port}  (Ctrl-C ends it)", flush=True)
    server.run()
    return 0
