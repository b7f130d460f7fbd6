"""The parser of ``knnlm``: near matches, flags with and without ``--knn-``, and imports only where they are needed."""

import argparse
from collections.abc import Callable
from typing import Any

from ..near_matches import UNKNOWN_FLAGS, Parser

Add = Callable[..., "CommandParser"]  # (name, function to run, help) -> the command's own parser

# What fairseq-eval-lm calls --knn-NAME; here both spellings work, wherever a command has one of them.
KNN_FLAGS = (
    "dump", "key", "layer", "key-dtype", "key-dim", "index", "datastore", "k", "lambda", "temperature", "nprobe", "far",
    "device", "engine", "ray-address", "metric", "mask", "score", "cache-size", "cache-lambda", "cache-theta",
    "cache-boundary", "save", "save-top", "preset", "dry-run", "head", "head-lambda", "gate", "gate-skip",
)  # fmt: skip


class CommandParser(Parser):
    """The parser of one command, or of all."""

    fill: Callable[["CommandParser"], None] | None = None  # adds the arguments, where that takes an import of fairseq
    takes_encoder_flags = False  # those of --tokenizer and --bpe, which fairseq knows
    _needs_datastore = False

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:  # type: ignore[override]
        if names == ("datastore",):
            # A positional argument that may also be given as a flag; without either, parse_args complains.
            self._needs_datastore = True
            self.add_argument("--datastore", dest="datastore", metavar="DIR", help=argparse.SUPPRESS)
            settings |= {"nargs": "?", "default": argparse.SUPPRESS}
        action = super().add_argument(*names, **settings)
        for name in names:
            other = other_spelling(name)
            if other is not None and other not in self._option_string_actions:
                self._option_string_actions[other] = action  # the help shows one of them
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The arguments; an unknown one is reported by the command that it was given to."""
        found, unknown = self.parse_known_args(args, namespace)
        command: CommandParser = found.parser
        found.encoder_flags = unknown
        if unknown and not (command.takes_encoder_flags and (found.tokenizer or found.bpe)):
            command.error(f"{UNKNOWN_FLAGS}{' '.join(unknown)}")
        if command._needs_datastore and found.datastore is None:
            command.error("the following arguments are required: DIR")
        return found


def other_spelling(flag: str) -> str | None:
    """--knn-k for --k and the other way round; None for what fairseq-eval-lm does not have."""
    name = flag.removeprefix("--knn-") if flag.startswith("--knn-") else flag.removeprefix("--")
    if not flag.startswith("--") or name not in KNN_FLAGS:
        return None
    return f"--{name}" if flag.startswith("--knn-") else f"--knn-{name}"
