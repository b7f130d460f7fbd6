"""What is hidden, and that nothing else is."""

import io
import logging
import warnings

import pytest
from omegaconf import OmegaConf

from fairseq_knnlm import logs


@pytest.fixture
def quiet():
    """Filters and levels as before afterwards."""
    names = ["root", *logs.QUIET_LOGGERS, *logs.COMMANDS_WITH_A_CONFIG, "fairseq.data.data_utils"]
    before = {name: (logging.getLogger(name).level, list(logging.getLogger(name).filters)) for name in names}
    with warnings.catch_warnings():
        yield
    for name, (level, filters) in before.items():
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).filters[:] = filters


HARMLESS = [
    "hydra.experimental.compose() is no longer experimental. Use hydra.compose()",
    "\nThe version_base parameter is not specified.\nPlease specify a compatability version level, or None.",
    "In 'config': Usage of deprecated keyword in package header '# @package _group_'.",
    "\n'config' is validated against ConfigStore schema with the same name.",
    "\nThe strict flag in the compose API is deprecated.",
    "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used.",
    "Support for mismatched key_padding_mask and attn_mask is deprecated. Use same type for both instead.",
    "`torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead.",
]


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        for message in [*HARMLESS, "overflow in your model"]:
            warnings.warn(message, UserWarning, stacklevel=1)
    return [str(warning.message) for warning in seen]


def test_warnings(quiet, monkeypatch):
    warnings.simplefilter("always")
    monkeypatch.setenv("KNNLM_VERBOSE", "1")
    logs.hide_harmless_messages()
    assert len(warned()) == len(HARMLESS) + 1
    monkeypatch.delenv("KNNLM_VERBOSE")
    logs.hide_harmless_messages()
    assert warned() == ["overflow in your model"]
    assert len(HARMLESS) == len(logs.HARMLESS_WARNINGS)


def test_log_lines(quiet, caplog):
    logging.getLogger().setLevel(logging.DEBUG)  # as a speech model of fairseq does when it is imported
    logs.hide_harmless_messages()
    with caplog.at_level(logging.DEBUG, logger="nobody"):
        logging.getLogger("hydra.core.utils").debug("Setting JobRuntime")
        logging.getLogger("hydra").warning("something real")
        logging.getLogger("fairseq_cli.eval_lm").info(OmegaConf.create({"a": 1}))
        logging.getLogger("fairseq_cli.eval_lm").info("Loss (base 2): 3.1, Perplexity: 8.57")
        for message in ("loaded 1", "loaded 1", "loaded 2"):
            logging.getLogger("fairseq.data.data_utils").info(message)
    assert caplog.messages == ["something real", "Loss (base 2): 3.1, Perplexity: 8.57", "loaded 1", "loaded 2"]


def test_our_lines_are_plain():
    root, stream = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    root.addHandler(handler)
    try:
        logs.show_our_lines_plainly()
        logs.show_our_lines_plainly()
        logging.getLogger("fairseq_knnlm.x").warning("ours")
        logging.getLogger("fairseq_cli.x").warning("theirs")
    finally:
        root.removeHandler(handler)
    ours, theirs = stream.getvalue().splitlines()
    assert ours.endswith(" ours") and len(ours.split()[0].split(":")) == 3
    assert theirs == "WARNING:fairseq_cli.x:theirs"
