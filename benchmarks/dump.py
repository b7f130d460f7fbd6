"""How fast a dump is beside the bare forward pass.

Every group of batches goes through the bare model and through the dump, in turns, so that both see the same machine and
have the same threads. At 1.0 dumping is free; it can be more, since a dump needs no more of the model than the key.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm

# It registers the task: --user-dir does not, where the package has been imported before.
import fairseq_knnlm.tasks.knn_language_modeling  # noqa: F401
from fairseq_knnlm.keys.running import for_each_batch
from fairseq_knnlm.tasks.dumping import KeyDumper

from .command import eval_lm_command


class Enough(Exception):
    """What was asked for is done."""


class Stopwatch:
    """Stands in for KeyDumper.dump: does what it does, and a bare forward pass over the same batches."""

    def __init__(self, groups: int):
        self.groups = groups
        self.seen = self.tokens = 0
        self.seconds = {"forward": 0.0, "dump": 0.0}
        self.dump = KeyDumper.dump

    def __call__(self, dumper: KeyDumper, group: dict, done: Callable[[int], None]) -> None:
        model, batches = dumper._entries._model, group["batches"]

        def forward(batch: dict) -> None:
            model(batch["net_input"]["src_tokens"], features_only=True)

        runs = {
            "forward": lambda: for_each_batch(model, forward, batches),
            "dump": lambda: self.dump(dumper, group, done),
        }
        order = list(runs) if self.seen % 2 else list(reversed(runs))
        for name in order:
            start = time.perf_counter()
            with torch.no_grad():
                runs[name]()
            if self.seen:  # the first group pays for allocations
                self.seconds[name] += time.perf_counter() - start
        self.tokens += sum(batch["ntokens"] for batch in batches) if self.seen else 0
        self.seen += 1
        if self.seen > self.groups:
            raise Enough


def measure(data: Path, path: Path, split: str, groups: int, **context: int) -> dict:
    """Tokens per second of each, and their ratio.

    Args:
        context: tokens_per_sample and context_window, where they are not the usual ones
    """
    watch = Stopwatch(groups)
    KeyDumper.dump = lambda *arguments: watch(*arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dump = ["--gen-subset", split, "--knn-dump", f"{folder}/datastore"]
            _, *words = eval_lm_command(data, path, *dump, **context)
            flags = [str(word) for word in words]
            cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_eval_lm_parser(), flags))
            with contextlib.suppress(Enough):
                eval_lm.main(cfg)
    finally:
        KeyDumper.dump = watch.dump
    if not watch.tokens:
        sys.exit(f"{split} is too short to time a dump; it is over in one step")
    speeds = {name: watch.tokens / seconds for name, seconds in watch.seconds.items()}
    return {**speeds, "ratio": speeds["dump"] / speeds["forward"]}


def table(result: dict) -> tuple[list[str], list[list[str]]]:
    speeds = [[name, f"{result[name]:,.0f}"] for name in ("forward", "dump")]
    return ["", "tokens/s"], [*speeds, ["dump / forward pass", f"{result['ratio']:.3f}"]]
