"""A small datastore and everything that is written from it, each command in a process of its own that can be killed.

Processes are forked from one that has imported everything, so that a hundred of them take a minute and not twenty.
"""

import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process cannot use the threads of its parent
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import faiss
import torch
import torch.fx.experimental.symbolic_shapes  # which the model imports at its first batch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm
from tiny import make_data, make_lines, make_model

import fairseq_knnlm.inspector.server
import fairseq_knnlm.spalm.analysis  # noqa: F401  imported here so that no forked process has to
from fairseq_knnlm import cli
from fairseq_knnlm.datastore import Datastore, dump_plan
from fairseq_knnlm.errors import KnnlmError

REPO = Path(__file__).resolve().parent.parent.parent
torch.set_num_threads(1)
faiss.omp_set_num_threads(1)
dump_plan.MIN_SHARDS = 3
USER_DIR = REPO / "fairseq_knnlm"
EVAL_FLAGS = [
    "--cpu", "--tokens-per-sample", "64", "--context-window", "32", "--max-tokens", "1024", "--no-progress-bar",
    "--num-workers", "0", "--user-dir", USER_DIR, "--task", "knn_language_modeling",
]  # fmt: skip
Command = list[object]


@dataclass
class Outcome:
    """How a process ended."""

    code: int  # negative: the signal that ended it
    output: str

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.output.splitlines() if "error: " in line]

    def check_one_sentence(self) -> str:
        """It failed as it should: one sentence, an exit code, no traceback."""
        assert self.code > 0, f"ended with {self.code}: {self.output[-1500:]}"
        assert "Traceback" not in self.output, self.output[-3000:]
        assert len(self.sentences) == 1, f"{len(self.sentences)} sentences: {self.output[-1500:]}"
        return self.sentences[0]


class Process:
    """A command in a forked process."""

    def __init__(self, command: Command, prepare: Callable[[], None] | None = None):
        """prepare: called in the new process before the command."""
        self._output = io.FileIO(os.memfd_create("output"), "r+")
        command = [str(part) for part in command]
        if command[0] != "knnlm":
            parsed_flags(tuple(command[1:]))  # takes a second, and is kept
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.dup2(self._output.fileno(), 1)
                os.dup2(self._output.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                if prepare:
                    prepare()
                code = run_command(command)
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def kill(self) -> bool:
        """End it at once; False if it had ended by itself."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            return False
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return True

    def wait(self, seconds: float = 120) -> Outcome:
        """How it ended; one that does not end in this time is a failure."""
        deadline = time.monotonic() + seconds
        while not (result := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"a process hung for {seconds} s: {self._read()[-1500:]}")
            time.sleep(0.005)
        return Outcome(os.waitstatus_to_exitcode(result[1]), self._read())

    def _read(self) -> str:
        self._output.seek(0)
        return self._output.readall().decode(errors="replace")


def run_command(command: list[str]) -> int:
    """What a user's shell would run, in this process; the exit code."""
    program, *arguments = command
    try:
        if program == "knnlm":
            return cli.main(arguments)
        flags = parsed_flags(tuple(arguments))
        if isinstance(flags, Outcome):
            sys.stderr.write(flags.output)
            return flags.code
        eval_lm.main(flags)
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except KnnlmError as error:  # as the excepthook of the package shows it
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


@cache
def parsed_flags(arguments: tuple[str, ...]):
    """The config of fairseq-eval-lm, or how it ended over a flag that it does not know."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            args = options.parse_args_and_arch(options.get_eval_lm_parser(), list(arguments))
            return convert_namespace_to_omegaconf(args)
    except SystemExit as error:
        return Outcome(int(error.code or 0), output.getvalue())


def run(command: Command, prepare: Callable[[], None] | None = None) -> Outcome:
    return Process(command, prepare).wait()


def succeed(command: Command) -> Outcome:
    outcome = run(command)
    assert outcome.code == 0, f"{' '.join(map(str, command))}\n{outcome.output[-3000:]}"
    return outcome


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder. What differs between two equal runs (how long they took) is left out."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name, data = str(path.relative_to(folder)), path.read_bytes()
            if path.name in ("index.json", "neighbors.json"):
                content = json.loads(data)
                content.pop("seconds", None)
                content.pop("checksum", None)
                data = json.dumps(content, sort_keys=True).encode()
            files[name] = data
    return files


def check_same(folder: Path, expected: dict[str, bytes]) -> None:
    """A folder holds what an undisturbed run writes, byte for byte, and nothing besides."""
    found = snapshot(folder)
    assert found.keys() == expected.keys(), f"files differ: {sorted(found.keys() ^ expected.keys())}"
    different = [name for name in found if found[name] != expected[name]]
    assert not different, f"bytes differ: {different}"


@dataclass
class Step:
    """One command that writes a folder, and what has to be there before it."""

    name: str
    command: Callable[[Path], Command]  # the folder that it writes to
    start: Callable[[Path], None] = lambda folder: None
    verified: str = ""  # what knnlm verify --all looks at, below the folder


class Workshop:
    """Text, model and a finished datastore, and the steps that write something."""

    def __init__(self, folder: Path):
        self.folder = folder
        utils.import_user_module(type("Args", (), {"user_dir": str(USER_DIR)}))
        self.data = make_data(folder / "data", train=make_lines(160, 0), valid=make_lines(30, 1))
        self.model = make_model(self.data, folder / "model.pt")
        self.store = folder / "store"
        succeed(self.dump(self.store))
        succeed(["knnlm", "build", self.store, "--index", "IVF16,SQfp16"])
        self.raw = folder / "raw" / "dstore"
        self._write_raw()
        self.bare = folder / "bare"
        shutil.copytree(self.store, self.bare, ignore=shutil.ignore_patterns("index"))
        self.steps = self._steps()

    def _write_raw(self) -> None:
        datastore = Datastore(self.store)
        self.raw.parent.mkdir()
        keys = datastore.gather_keys(torch.arange(len(datastore)).numpy())
        keys.tofile(f"{self.raw}_keys.npy")
        datastore.values.astype("int16").tofile(f"{self.raw}_vals.npy")

    def eval_lm(self, *flags: object) -> Command:
        return ["fairseq-eval-lm", self.data, "--path", self.model, *EVAL_FLAGS, *flags]

    def dump(self, folder: Path, *flags: object) -> Command:
        return self.eval_lm("--gen-subset", "train", "--knn-dump", folder, *flags)

    def score(self, store: Path, *flags: object) -> Command:
        return self.eval_lm("--gen-subset", "valid", "--knn-datastore", store, "--knn-index", "IVF16,SQfp16", *flags)

    def _steps(self) -> list[Step]:
        def copy_bare(folder: Path) -> None:
            shutil.copytree(self.bare, folder / "store")

        def copy_whole(folder: Path) -> None:
            shutil.copytree(self.store, folder / "store")

        def build(spec: str, *flags: object) -> Callable[[Path], Command]:
            return lambda folder: ["knnlm", "build", folder / "store", "--index", spec, *flags]

        dictionary = self.data / "dict.txt"
        return [
            Step("dump", lambda folder: self.dump(folder / "store"), verified="store"),
            Step("build", build("IVF16,SQfp16"), copy_bare, "store"),
            Step("dump, compact", lambda folder: self.dump(folder / "store", "--knn-key-dim", 16, "--knn-key-dtype",
                                                           "int8"), verified="store"),
            Step("compact", lambda folder: ["knnlm", "compact", self.store, "--dim", 16, "-o", folder / "small"],
                 verified="small"),
            Step("drop keys", build("IVF16,SQfp16", "--drop-keys"), copy_bare, "store"),
            Step("build, FastScan", build("IVF4,PQ8x4fs"), copy_bare, "store"),
            Step("rebuild", build("IVF16,SQfp16", "--force", "--seed", "2"), copy_whole, "store"),
            Step("save", lambda folder: self.score(self.store, "--knn-k", 16, "--knn-save", folder / "save"),
                 verified="save"),
            Step("neighbors",
                 lambda folder: ["knnlm", "neighbors", "--datastore", self.store, "--queries", self.store, "--k", 4,
                                 "--index", "IVF16,SQfp16", "-o", folder / "table"], verified="table"),
            Step("subsample", lambda folder: ["knnlm", "subsample", self.store, "--fraction", 0.5, "-o",
                                              folder / "part"], verified="part"),
            Step("import",
                 lambda folder: ["knnlm", "import", self.raw, "-o", folder / "imported", "--dict", dictionary],
                 verified="imported"),
        ]  # fmt: skip

    def fresh(self, step: Step) -> Path:
        """A folder in which a step can begin."""
        folder = self.folder / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        step.start(folder)
        return folder

    def reference(self, step: Step) -> tuple[dict[str, bytes], float]:
        """What an undisturbed run of a step writes, and how long it takes."""
        folder = self.fresh(step)
        started = time.perf_counter()
        succeed(step.command(folder))
        seconds = time.perf_counter() - started
        succeed(["knnlm", "verify", "--all", folder / step.verified])
        return snapshot(folder), seconds

    def finish(self, step: Step, folder: Path, expected: dict[str, bytes]) -> None:
        """The same command once more ends as if nothing had happened."""
        outcome = run(step.command(folder))
        # A save is never overwritten: a process that was killed after its last rename had finished it.
        done = step.name == "save" and "exists already" in outcome.check_one_sentence() if outcome.code else True
        assert done, outcome.output[-3000:]
        check_same(folder, expected)
