"""The commands of fairseq and of this package, in this process or as processes of their own.

Starting Python, torch and fairseq takes seconds, so tests run a command here unless the process itself is tested.
"""

import contextlib
import io
import logging
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, override_module_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fairseq_knnlm import KnnlmError, cli

REPO = Path(__file__).resolve().parent.parent
KNN_TASK = ["--user-dir", REPO / "fairseq_knnlm", "--task", "knn_language_modeling"]
EVAL_FLAGS = [
    "--cpu", "--tokens-per-sample", "64", "--context-window", "32", "--max-tokens", "1024", "--no-progress-bar",
    "--num-workers", "0",
]  # fmt: skip
TRAINING = [
    "--task", "language_modeling", "--arch", "transformer_lm", "--cpu", "--decoder-layers", "2",
    "--decoder-embed-dim", "64", "--decoder-input-dim", "64", "--decoder-output-dim", "64",
    "--decoder-ffn-embed-dim", "128", "--decoder-attention-heads", "2", "--tokens-per-sample", "64",
    "--max-tokens", "1024", "--optimizer", "adam", "--lr", "0.005", "--dropout", "0.1", "--no-epoch-checkpoints",
    "--disable-validation", "--no-progress-bar", "--num-workers", "0",
]  # fmt: skip
SPALM_TRAINING = [
    "--user-dir", REPO / "fairseq_knnlm", "--task", "spalm", "--cpu", "--tokens-per-sample", "32", "--batch-size", "8",
    "--memory-size", "32", "--criterion", "adaptive_loss", "--adaptive-cutoff", "50,120", "--ddp-backend",
    "legacy_ddp", "--optimizer", "adam", "--lr", "0.005", "--no-progress-bar", "--no-epoch-checkpoints",
    "--num-workers", "0",
]  # fmt: skip
XL = ["--arch", "transformer_xl_lm", "--layers", "2", "--dim", "64", "--heads", "2", "--ffn-dim", "128"]
SPALM_SCORING = ["--task", "spalm", "--tokens-per-sample", "32", "--context-window", "0"]


# --- processes ------------------------------------------------------------------------------------------------------


def run(*command: object, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
    """Run a command as a user would, from the project's folder."""
    words = [str(part) for part in command]
    if words[0].startswith("fairseq-"):
        words[:1] = [sys.executable, "-m", "fairseq_cli." + words[0][len("fairseq-") :].replace("-", "_")]
    elif words[0] == "knnlm":
        words[:1] = [sys.executable, "-m", "fairseq_knnlm.cli"]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, **kwargs)
    if check and result.returncode:
        pytest.fail(f"{' '.join(words)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result


def eval_lm(data: Path, model: Path, *flags, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
    """fairseq-eval-lm as a process of its own."""
    return run("fairseq-eval-lm", data, "--path", model, *EVAL_FLAGS, *KNN_TASK, *flags, check=check, **kwargs)


def fails_with(result: subprocess.CompletedProcess, *parts: str) -> str:
    """The command failed with one sentence, not a traceback, which contains these parts."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr[-2000:]
    sentence = [line for line in result.stderr.splitlines() if "error: " in line][-1]
    for part in parts:
        assert part in sentence
    return sentence


# --- in this process ------------------------------------------------------------------------------------------------

_composed: dict[tuple, tuple[dict[str, str], DictConfig]] = {}


def config_of(args: Namespace) -> DictConfig:
    """What ``convert_namespace_to_omegaconf`` makes of parsed arguments, without the time that Hydra takes for it.

    fairseq writes the arguments as some hundred overrides and lets Hydra compose a config from them. Two calls that
    name the same task, model and so on differ in the values of some overrides only: the config is composed once, and
    those are set in a copy of it, parsed as Hydra parses them. ``test_commands.py`` compares both ways.
    """
    lines, deletes = override_module_args(args)
    overrides = dict(line.split("=", 1) for line in lines)
    kind = (*deletes, *(f"{name}={value}" for name, value in overrides.items() if "." not in name or "._name" in name))
    if kind not in _composed:
        composed = convert_namespace_to_omegaconf(args)
        if any(isinstance(part, Namespace) for part in composed.values()):
            return composed  # of old code that keeps all arguments in a place that we do not know
        _composed[kind] = overrides, composed
    known, composed = _composed[kind]
    config = OmegaConf.create(OmegaConf.to_container(composed))
    differing = [f"{name}={value}" for name, value in overrides.items() if known[name] != value]
    for override in OverridesParser.create().parse_overrides(differing):
        OmegaConf.update(config, override.key_or_group, override.value())
    OmegaConf.set_struct(config, True)
    return config


def parse(parser: Callable, *arguments: object) -> DictConfig:
    """The config of a fairseq command from what a user types."""
    import fairseq_knnlm.tasks.knn_language_modeling  # fairseq imports a user folder only if nobody else has
    import fairseq_knnlm.tasks.spalm  # noqa: F401

    return config_of(options.parse_args_and_arch(parser(), list(map(str, arguments))))


def eval_lm_here(data: Path, model: Path, *flags, stock: bool = False) -> dict:
    """fairseq-eval-lm; what it returns."""
    from fairseq_cli import eval_lm

    task = [] if stock else KNN_TASK
    return eval_lm.main(parse(options.get_eval_lm_parser, data, "--path", model, *EVAL_FLAGS, *task, *flags))


def train_here(data: Path, folder: Path, *flags) -> Path:
    """fairseq-train; the checkpoint."""
    from fairseq.logging import metrics
    from fairseq_cli import train

    metrics.reset()
    train.main(parse(options.get_training_parser, data, "--save-dir", folder, *flags))
    return folder / "checkpoint_last.pt"


def preprocess_here(folder: Path, dictionary: Path | None = None, **texts: Path) -> Path:
    """fairseq-preprocess of one text for each split; the folder."""
    from fairseq_cli import preprocess

    splits = [part for split, text in texts.items() for part in (f"--{split}pref", text)]
    known = ["--srcdict", dictionary] if dictionary else []
    flags = ["--only-source", *splits, "--destdir", folder, "--workers", "1", *known]
    handlers = list(preprocess.logger.handlers)
    preprocess.main(options.get_preprocessing_parser().parse_args(list(map(str, flags))))
    for handler in [handler for handler in preprocess.logger.handlers if handler not in handlers]:
        preprocess.logger.removeHandler(handler)  # its log file, which a process would close at its end
        handler.close()
    return folder


def interactive_here(data: Path, model: Path, prompts: list[str], *flags) -> SimpleNamespace:
    """fairseq-interactive with these lines on standard input; what it printed and what it logged."""
    from fairseq_cli import interactive

    arguments = [data, "--path", model, "--cpu", *KNN_TASK, *flags]
    config = parse(options.get_interactive_generation_parser, *arguments)
    with mock.patch.object(sys, "stdin", io.StringIO("".join(f"{prompt}\n" for prompt in prompts))):
        return _printed_by(interactive.main, config)


def generate_here(data: Path, model: Path, *flags) -> SimpleNamespace:
    """fairseq-generate; what it printed and what it logged."""
    from fairseq_cli import generate

    arguments = [data, "--path", model, "--cpu", "--num-workers", "0", *KNN_TASK, *flags]
    config = parse(options.get_generation_parser, *arguments)
    return _printed_by(generate.main, config)


def _printed_by(main: Callable, config: DictConfig) -> SimpleNamespace:
    output, log = io.StringIO(), io.StringIO()
    handler, root = logging.StreamHandler(log), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(output):
            main(config)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return SimpleNamespace(stdout=output.getvalue(), log=log.getvalue())


def sentence_of(command: Callable, *arguments, **options) -> str:
    """The one sentence that a command fails with."""
    with pytest.raises(KnnlmError) as error:
        command(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def knnlm(*arguments: object) -> int:
    """The command knnlm; its exit code."""
    return cli.main([str(argument) for argument in arguments])


def error_of(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """What the command knnlm prints when it fails, which is one sentence."""
    assert knnlm(*arguments) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    return error


def make_table(datastore: Path, queries: Path, folder: Path, *flags: object) -> int:
    """knnlm neighbors; its exit code."""
    return knnlm("neighbors", "--datastore", datastore, "--queries", queries, "-o", folder, *flags)
