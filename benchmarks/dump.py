"""How much a dump costs beside the forward pass that it cannot do without.

    python -m benchmarks.dump --data DATA-BIN --path CHECKPOINT [--split valid] [--batches 200]

Every batch goes through the bare model and through the dump, in turns, so that both see the same machine. Prints their
ratio (1.0: dumping is free).
"""

import argparse
import contextlib
import tempfile
import time

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm

from fairseq_knnlm.dump import KeyDumper


class Enough(Exception):
    """The batches asked for are done."""


class Stopwatch:
    """Stands in for KeyDumper._dump: does what it does, after a bare forward pass over the same batch."""

    def __init__(self, batches: int):
        self.batches = batches
        self.seen = self.tokens = 0
        self.seconds = {"forward": 0.0, "dump": 0.0}
        self._dump = KeyDumper._dump

    def __call__(self, dumper: KeyDumper, model: torch.nn.Module, batch: dict) -> list:
        runs = {
            "forward": lambda: model(batch["net_input"]["src_tokens"], features_only=True),
            "dump": lambda: self._dump(dumper, model, batch),
        }
        order = list(runs) if self.seen % 2 else list(reversed(runs))
        results = {}
        for name in order:
            start = time.perf_counter()
            results[name] = runs[name]()
            if self.seen:  # the first batch pays for allocations
                self.seconds[name] += time.perf_counter() - start
        self.tokens += batch["ntokens"] if self.seen else 0
        self.seen += 1
        if self.seen > self.batches:
            raise Enough
        return results["dump"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    watch = Stopwatch(args.batches)
    KeyDumper._dump = lambda *arguments: watch(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            args.data, "--path", args.path, "--gen-subset", args.split, "--tokens-per-sample", "256",
            "--context-window", "128", "--max-tokens", "4096", "--no-progress-bar", "--user-dir", "fairseq_knnlm",
            "--task", "knn_language_modeling", "--knn-dump", f"{folder}/datastore",
        ]  # fmt: skip
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_eval_lm_parser(), flags))
        with contextlib.suppress(Enough):
            eval_lm.main(cfg)
    speeds = {name: watch.tokens / seconds for name, seconds in watch.seconds.items()}
    for name, speed in speeds.items():
        print(f"{name:<8} {speed:>9,.0f} tokens/s")
    print(f"dump / forward pass {speeds['dump'] / speeds['forward']:.3f}")


if __name__ == "__main__":
    main()
