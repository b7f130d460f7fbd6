"""``did you mean --knn-datastore?``: a near match for flags and commands that do not exist."""

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

UNKNOWN_FLAGS = "unrecognized arguments: "
UNKNOWN_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that asks for the nearest of the known words; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def with_near_matches(message: str, parser: argparse.ArgumentParser, ours: Iterable[str] = (), remedy: str = "") -> str:
    """A message of argparse with what may have been meant.

    Args:
        parser: which flags there are
        ours: flags that exist, but not in this parser
        remedy: what to say of those
    """
    if message.startswith(UNKNOWN_FLAGS):
        known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        hints = []
        for word in message[len(UNKNOWN_FLAGS) :].split():
            flag = word.split("=")[0]
            if flag in ours:
                hints.append(f"; {flag} {remedy}")
            elif flag.startswith("--"):
                hints.append(did_you_mean(flag, known))
        return message + "".join(dict.fromkeys(hints))
    if match := UNKNOWN_CHOICE.search(message):
        choices = re.findall(r"'([^']*)'", match[2])
        return message + did_you_mean(match[1], choices)
    return message


class Parser(argparse.ArgumentParser):
    """Of the command ``knnlm``."""

    def error(self, message: str) -> NoReturn:
        super().error(with_near_matches(message, self))


def teach_fairseq_near_matches(ours: Iterable[str]) -> None:
    """For the parser of the running fairseq command, when a flag is unknown that begins with --knn.

    fairseq makes the parser itself and shows it to a task only if --task names that one, so the only place to be heard
    in is the class. Every other message passes as it is.

    Args:
        ours: the flags of our tasks
    """
    ours = tuple(ours)
    original = argparse.ArgumentParser.error
    if getattr(original, "knows_near_matches", False):
        return

    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        if message.startswith(UNKNOWN_FLAGS) and "--knn" in message and not isinstance(self, Parser):
            message = with_near_matches(message, self, ours, "is a flag of --task knn_language_modeling; add that")
        original(self, message)

    error.knows_near_matches = True  # type: ignore[attr-defined]
    argparse.ArgumentParser.error = error  # type: ignore[method-assign]
