"""What a person reads while a command runs: our own lines plainly, and none of what is known to be harmless.

``KNNLM_VERBOSE=1`` shows everything, as the libraries say it. What fairseq says while it is imported itself comes
before any plugin, so that stays.
"""

import logging
import os
import sys
import warnings
from typing import Any, TextIO

from tqdm import tqdm

from .errors import is_verbose

OURS = "fairseq_knnlm"

# The beginning of each warning, as a regular expression, and why it is harmless.
HARMLESS_WARNINGS = {
    r"hydra\.experimental\.(initialize|compose)\(\) is no longer": "fairseq calls hydra by old names, which still work",
    r"\s*The version_base parameter is not specified": "fairseq wants hydra's old behaviour, which is the default",
    r".*Usage of deprecated keyword in package header": "about a configuration file inside fairseq",
    r"\s*'config' is validated against ConfigStore schema": "about the same file",
    r"\s*The strict flag in the compose API is deprecated": "fairseq passes it; hydra does the same without it",
    r"'pin_memory' argument is set as true but no accelerator": "fairseq always asks for it; it does nothing here",
    r"Support for mismatched key_padding_mask and attn_mask": "fairseq's masks have two types; torch converts one",
    r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated": "fairseq's old name of torch.amp, when it trains",
}

# Loggers whose messages below a level tell nobody anything, and why.
QUIET_LOGGERS = {
    "faiss": logging.WARNING,  # which instruction set it was compiled for
    "faiss.loader": logging.WARNING,
    "fairseq.tasks.text_to_speech": logging.WARNING,  # that tensorboardX would be nice to have
    "fairseq.tasks.fairseq_task": logging.WARNING,  # how it iterates over batches
}
# Commands whose first line is the whole configuration, 8 kB of it. fairseq-train keeps it: it says what was trained.
COMMANDS_WITH_A_CONFIG = ("fairseq_cli.eval_lm", "fairseq_cli.generate", "fairseq_cli.interactive")


def hide_harmless_messages() -> None:
    """Leave out the warnings and log lines above, from now on and in this process."""
    if is_verbose():
        return
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # A speech model sets the level DEBUG for all when fairseq imports it; this is what the commands themselves want.
    logging.getLogger().setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    for name, level in QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    for name in COMMANDS_WITH_A_CONFIG:
        _add_filter(name, _NoConfig())
    _add_filter("fairseq.data.data_utils", _NoRepetition())  # a split that is opened twice is announced once


def show_our_lines_plainly() -> None:
    """Our own messages without level and module; those of others stay as they are. Lines and bars do not mix."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler and not isinstance(handler.formatter, _PlainFormatter):
            handler.setFormatter(_PlainFormatter(handler.formatter))
            _keep_bars_apart(handler)


def log_plainly() -> None:
    """The log of ``knnlm``: plain sentences on standard error, and nothing that a library set up before."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _keep_bars_apart(handler)
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _keep_bars_apart(handler: logging.StreamHandler) -> None:
    if handler.stream.isatty():
        handler.setStream(_BesideBars(handler.stream))


class _PlainFormatter(logging.Formatter):
    """The time and the message for our own records, another formatter for the rest."""

    def __init__(self, others: logging.Formatter | None):
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")
        self._others = others or logging.Formatter(logging.BASIC_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record) if record.name.split(".")[0] == OURS else self._others.format(record)


class _BesideBars:
    """A terminal that takes the bars away, writes, and draws them again below."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with tqdm.external_write_mode(file=self._stream):
            return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _NoConfig(logging.Filter):
    """Leaves out a record that is nothing but a configuration object."""

    def filter(self, record: logging.LogRecord) -> bool:
        return type(record.msg).__name__ != "DictConfig"


class _NoRepetition(logging.Filter):
    """Leaves out what was said just before."""

    _last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message, self._last = self._last, record.getMessage()
        return message != self._last


def _add_filter(name: str, new: logging.Filter) -> None:
    logger = logging.getLogger(name)
    if not any(type(present) is type(new) for present in logger.filters):
        logger.addFilter(new)
