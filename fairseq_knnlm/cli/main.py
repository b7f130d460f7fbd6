"""The ``knnlm`` command: what has no place in a fairseq command."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .. import __version__
from ..errors import INTERRUPTED, is_verbose, sentence_for
from ..logs import hide_harmless_messages, log_plainly
from .parsing import CommandParser

EPILOG = """The commands of fairseq find this package by its folder, which knnlm user-dir prints:
    fairseq-eval-lm ... --user-dir $(knnlm user-dir) --task knn_language_modeling
Flags that fairseq-eval-lm calls --knn-NAME may be given as --NAME or as --knn-NAME.
KNNLM_VERBOSE=1 in the environment shows every message and the traceback of every error."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    log_plainly()
    hide_harmless_messages()
    try:
        args = _parser().parse_args(arguments)
        if not args.light:
            from ..fairseq_setup import set_up_fairseq

            set_up_fairseq()
        return args.run(args)
    except BrokenPipeError:  # the reader, head for example, has enough; Python would complain once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        sentence = sentence_for(error)
        if sentence is None and isinstance(error, OSError):  # whatever file it was, a traceback would not help
            sentence = f"error: a file cannot be used: {error.strerror or error}"
        if sentence is None or is_verbose():
            raise
        print(sentence, file=sys.stderr)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _parser() -> CommandParser:
    # Imported here, because importing fairseq and FAISS logs a dozen lines unless the log has been set up before.
    from .cluster_commands import add_cluster_commands
    from .datastores import add_datastore_commands
    from .embed_command import add_embed_command
    from .gate_command import add_gate_command
    from .hf_commands import add_hf_commands
    from .learn_command import add_learn_command
    from .neighbors_command import add_neighbors_command
    from .prototype_commands import add_prototype_commands
    from .prune_command import add_prune_command
    from .saves import add_save_commands
    from .score_command import add_score_command
    from .spalm_commands import add_spalm_commands
    from .texts import add_text_commands

    parser = CommandParser(
        prog="knnlm", description="Datastores and indexes of nearest-neighbour LMs.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int] | None,
        help: str,
        fill: Callable[[CommandParser], None] | None = None,
        light: bool = False,
    ) -> CommandParser:
        """
        Args:
            fill: adds the arguments when they are needed, where that takes long
            light: runs without torch, fairseq and FAISS
        """
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.fill = fill
        command.set_defaults(run=run, parser=command, light=light)
        return command

    add_datastore_commands(add)
    add_save_commands(add)
    add_gate_command(add)
    add_neighbors_command(add)
    add_prune_command(add)
    add_learn_command(add)
    add_spalm_commands(add("spalm", None, "what a trained SPALM does with its memory: gates, neighbours, gains, K"))
    add_embed_command(add)
    add_prototype_commands(
        add("prototypes", None, "what a trained neural editor knows: perplexity, active prototypes, what it writes")
    )
    add_cluster_commands(add("cluster", None, "dump and build with the nodes of a Ray cluster, and what they are"))
    add_hf_commands(add("hf", None, "models of Hugging Face: prepare text for one"))
    add_score_command(add)
    add_text_commands(add)
    add("user-dir", _user_dir, "print the folder of this package, which fairseq wants as --user-dir", light=True)
    return parser


def _user_dir(args: argparse.Namespace) -> int:
    print(Path(__file__).resolve().parent.parent)
    return 0
