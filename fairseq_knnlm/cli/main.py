"""The ``knnlm`` command: what has no place in a fairseq command."""

import argparse
import logging
import sys
from collections.abc import Callable

from .. import __version__
from ..errors import KnnlmError
from ..fairseq_setup import set_up_fairseq


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    _log_plainly()
    try:
        set_up_fairseq()
        args = _parser().parse_args(arguments)
        return args.run(args)
    except KnnlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # whatever file it was, a traceback would not help
        print(f"error: {error.filename or 'a file'} cannot be used: {error.strerror or error}", file=sys.stderr)
        return 1


def _log_plainly() -> None:
    """Plain sentences on standard error. Modules of fairseq set up a log of everything when they are imported."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _parser() -> argparse.ArgumentParser:
    # Imported here, because importing fairseq and FAISS logs a dozen lines unless the log has been set up before.
    from .datastores import add_datastore_commands
    from .neighbors_command import add_neighbors_command
    from .saves import add_save_commands
    from .spalm_commands import add_spalm_commands
    from .texts import add_text_commands

    parser = argparse.ArgumentParser(prog="knnlm", description="Datastores and indexes of nearest-neighbour LMs.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int] | None, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run)
        return command

    add_datastore_commands(add)
    add_save_commands(add)
    add_neighbors_command(add)
    add_spalm_commands(add("spalm", None, "what a trained SPALM does with its memory: gates, neighbours, gains, K"))
    add_text_commands(add)
    return parser
