"""What people get wrong, one row each: the command, what is wrong, and a part of the sentence that they read."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from workshop import EVAL_FLAGS, Command, Outcome, Workshop, run, snapshot, succeed

from fairseq_knnlm.datastore import Manifest

Row = tuple[Command, str]


def run_bad_input(workshop: Workshop) -> dict[str, int]:
    """Every row: one sentence, an exit code that is not zero, and no file changed; how many rows of each command."""
    folder = workshop.folder / "input"
    folder.mkdir()
    succeed(workshop.score(workshop.store, "--knn-k", 8, "--knn-save", folder / "save"))
    succeed(workshop.score(workshop.store, "--knn-k", "all", "--knn-save", folder / "save-all"))
    succeed(workshop.eval_lm("--gen-subset", "valid", "--knn-save", folder / "save-bare"))
    succeed(["knnlm", "neighbors", "--datastore", workshop.store, "--queries", workshop.store, "--index",
             "IVF16,SQfp16", "-o", folder / "table"])  # fmt: skip
    before = snapshot(workshop.folder)
    counts: dict[str, int] = {}
    problems: list[str] = []
    for command, part in rows(workshop, folder):
        problem = _problem(run(command), part)
        after = snapshot(workshop.folder)
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if changed:
            problem += f"\nchanged {changed}"
            before = after
        if problem:
            what = " ".join(str(word).replace(str(workshop.folder), "") for word in command if word not in EVAL_FLAGS)
            problems.append(f"{what}\n    {problem}")
        name = " ".join(map(str, command[: 2 if command[0] == "knnlm" else 1]))
        counts[name] = counts.get(name, 0) + 1
    assert not problems, "\n".join(problems)
    return counts


def _problem(outcome: Outcome, part: str) -> str:
    """What is wrong with the answer to a wrong command; empty if nothing is."""
    if outcome.code <= 0:
        return f"ended with {outcome.code}: {outcome.output[-1000:]}"
    if "Traceback" in outcome.output:
        return outcome.output[-1500:]
    if len(outcome.sentences) != 1:
        return f"{len(outcome.sentences)} sentences: {outcome.output[-1000:]}"
    return "" if part in outcome.sentences[0] else f"'{part}' is not in: {outcome.sentences[0]}"


def rows(workshop: Workshop, folder: Path) -> Iterator[Row]:
    yield from _flags(workshop, folder)
    yield from _files(workshop, folder)
    yield from _datastore_commands(workshop, folder)
    yield from _saves(workshop, folder)
    yield from _texts(workshop, folder)
    yield from _imports(workshop, folder)
    yield from _neighbors(workshop, folder)


def _flags(workshop: Workshop, folder: Path) -> Iterator[Row]:
    """Flags of fairseq-eval-lm."""
    store = workshop.store
    for flags, part in (
        (("--knn-lambda", "1.5"), "--knn-lambda"),
        (("--knn-lambda", "-0.1"), "--knn-lambda"),
        (("--knn-lambda", "0.1,0.2"), "2 values for 1 datastores"),
        (("--knn-lambda", "much"), "takes numbers"),
        (("--knn-lambda", "nan"), "--knn-lambda"),
        (("--knn-k", "0"), "--knn-k"),
        (("--knn-k", "-5"), "--knn-k"),
        (("--knn-k", "2.5"), "--knn-k"),
        (("--knn-k", "many"), "--knn-k"),
        (("--knn-temperature", "0"), "--knn-temperature"),
        (("--knn-temperature", "-1"), "--knn-temperature"),
        (("--knn-temperature", "hot"), "--knn-temperature takes numbers separated by commas"),
        (("--knn-temperature", "nan"), "--knn-temperature"),
        (("--knn-nprobe", "0"), "--knn-nprobe"),
        (("--knn-nprobe", "some"), "invalid int value"),
        (("--knn-metric", "cosine"), "invalid choice"),
        (("--knn-mask", "none"), "invalid choice"),
        (("--knn-score", "approximate"), "invalid choice"),
        (("--knn-index", "bestest"), "neither a preset"),
        (("--knn-index", ".."), "neither a preset"),
        (("--knn-index", "IVF16,PQ7"), "neither a preset"),
        (("--knn-index", "IVF4,PQ8x16"), "entries to train its codes"),
        (("--knn-index", "HNSW8", "--knn-k", "all"), "--knn-k all"),
        (("--knn-k", "all", "--knn-score", "index", "--knn-index", "IVF16,SQfp16"), "leave out --knn-score"),
        (("--knn-key", "output"), "holds the key ffn_input_ln"),
        (("--knn-key", "brain"), "invalid choice"),
        (("--knn-layer", "0"), "keys of layer 1, not 0"),
        (("--knn-layer", "7"), "does not exist"),
        (("--knn-dump", folder / "new"), "two runs"),
        (("--knn-cache-size", "-1"), "--knn-cache-size"),
        (("--knn-cache-size", "5", "--knn-cache-lambda", "0.9"), "at most 1 together"),
        (("--knn-cache-size", "5", "--knn-cache-theta", "-1"), "--knn-cache-theta"),
        (("--knn-cache-lambda", "0.2"), "does nothing without --knn-cache-size"),
        (("--knn-cache-size", "5", "--knn-cache-boundary", "re:("), "regular expression"),
        (("--knn-cache-size", "5", "--knn-cache-boundary", "no such line"), "not in the dictionary"),
        (("--knn-cache-size", "5", "--knn-cache-boundary", "w1 w1 w1"), "no line of the text"),
        (("--knn-save", folder / "save"), "exists already"),
        (("--knn-save", workshop.model), "exists already"),
        (("--knn-save", workshop.model / "below"), "file, not a folder"),
        (("--knn-save", "/proc/nothing/save"), "cannot be written"),
        (("--num-shards", "2", "--shard-id", "2"), "--shard-id 2 does not exist"),
        (("--tokens-per-sample", "16"), "larger than --context-window"),
        (("--tokens-per-sample", "4000", "--context-window", "0"), "do not fit the model"),
        (("--gen-subset", "nothing"), "there is no split"),
    ):
        yield workshop.score(store, *flags), part
    for flags in (("--knn-lambda", "0.3"), ("--knn-key", "output"), ("--knn-metric", "ip"), ("--knn-k", "5"),
                  ("--knn-index", "flat"), ("--knn-temperature", "2"), ("--knn-nprobe", "3")):  # fmt: skip
        yield workshop.eval_lm("--gen-subset", "valid", *flags), f"{flags[0]} does nothing"
    yield workshop.score(f"{store},{store}", "--knn-lambda", "0.6,0.6"), "sum at most 1"
    yield workshop.score(f"{store},"), "is not a datastore"
    for flags, part in (
        (("--knn-dump", workshop.model), "is a file, not a folder"),
        (("--knn-dump", folder), "is not empty and not a datastore"),
        (("--knn-dump", "/proc/nothing/store"), "cannot be written"),
        (("--knn-dump", folder / ("n" * 300)), "name is too long"),
        (("--knn-dump", folder / "new", "--knn-key-dtype", "float64"), "invalid choice"),
        (("--knn-dump", folder / "new", "--knn-layer", "-9"), "does not exist"),
        (("--knn-dump", folder / "new", "--knn-save", folder / "s"), "dump without them"),
        (("--knn-dump", store, "--context-window", "16"), "holds another dump"),
        (("--knn-dump", store, "--knn-key", "output"), "holds another dump"),
    ):
        yield workshop.eval_lm("--gen-subset", "train", *flags), part


def _files(workshop: Workshop, folder: Path) -> Iterator[Row]:
    """Datastores that are not what they should be."""

    # The snapshot of the caller is of before: these copies are made in a folder that it does not see.
    copies = Path(str(workshop.folder) + "-copies")
    copies.mkdir()
    try:

        def changed(name: str, **facts) -> Path:
            shutil.copytree(workshop.store, copies / name)
            manifest = Manifest.load(copies / name)
            for fact, value in facts.items():
                if fact in ("dictionary_sha256", "checkpoint_sha256"):
                    manifest.source[fact] = value
                else:
                    setattr(manifest, fact, value)
            manifest.save(copies / name)
            return copies / name

        yield workshop.score(folder / "nothing"), "is not a datastore"
        yield workshop.score(workshop.model), "is not a datastore"
        yield workshop.score(folder / "save"), "is not a datastore"
        yield workshop.score(changed("incomplete", complete=False)), "is incomplete"
        yield workshop.score(changed("version", version=9)), "format version 9"
        yield workshop.score(changed("format", format="thesis")), "does not describe a datastore"
        yield workshop.score(changed("dim", dim=16)), "the manifest says"
        yield workshop.score(changed("entries", entries=7)), "is damaged"
        yield workshop.score(changed("dictionary", dictionary_sha256="x")), "another dictionary"
        yield workshop.score(changed("checkpoint", checkpoint_sha256="x")), "another checkpoint"
        yield workshop.score(changed("key", key="brain")), "brain"
        yield workshop.score(changed("layer", layer=9)), "does not exist"
        yield workshop.score(changed("dtype", key_dtype="bfloat16")), "is damaged"
        lost = changed("lost")
        (lost / "values-00001.npy").unlink()
        yield workshop.score(lost), "values-00001.npy is missing"
        swapped = changed("swapped")
        shutil.copyfile(swapped / "values-00001.npy", swapped / "keys-00001.npy")
        yield workshop.score(swapped), "keys-00001.npy"
        empty = changed("empty")
        (empty / "manifest.json").write_bytes(b"")
        yield workshop.score(empty), "manifest.json is damaged"
        binary = changed("binary")
        (binary / "manifest.json").write_bytes(bytes(range(256)))
        yield workshop.score(binary), "manifest.json is damaged"
        unindexed = changed("unindexed")
        (unindexed / "index/IVF16_SQfp16/index.faiss").unlink()
        yield workshop.score(unindexed), "index.faiss is missing"
        yield workshop.score(changed("metric"), "--knn-index", "IVF16_SQfp16", "--knn-metric", "ip"), "metric l2"
    finally:
        shutil.rmtree(copies)


def _datastore_commands(workshop: Workshop, folder: Path) -> Iterator[Row]:
    store = workshop.store
    for name in ("..", ".", "", "../other", "/tmp/x", "a/b", "a.partial", "a.lock", "-x", "a.old-1", "a b"):
        yield ["knnlm", "build", store, "--index", "flat", f"--name={name}"], "cannot be the name of an index"
    for command in ("build", "info", "verify"):
        yield ["knnlm", command, folder / "nothing"], "is not a datastore"
        yield ["knnlm", command], "arguments are required"
    yield ["knnlm", "build", store, "--index", "bestest"], "neither a preset"
    yield ["knnlm", "build", store, "--metric", "cosine"], "invalid choice"
    yield ["knnlm", "build", store, "--seed", "x"], "invalid int value"
    yield ["knnlm", "subsample", store, "--fraction", 0, "-o", folder / "new"], "--fraction must be"
    yield ["knnlm", "subsample", store, "--fraction", 2, "-o", folder / "new"], "--fraction must be"
    yield ["knnlm", "subsample", store, "--fraction", "nan", "-o", folder / "new"], "--fraction must be"
    yield ["knnlm", "subsample", store, "--fraction", 1e-9, "-o", folder / "new"], "larger --fraction"
    yield ["knnlm", "subsample", store, "--fraction", 0.5, "-o", store], "another folder"
    yield ["knnlm", "subsample", store, "--fraction", 0.5, "-o", workshop.data], "not empty"
    yield ["knnlm", "subsample", store, "--fraction", 0.5, "-o", workshop.bare], "holds another dump"
    yield ["knnlm", "subsample", store, "--fraction", 0.5], "arguments are required"
    yield ["knnlm", "dance"], "invalid choice"
    yield ["knnlm"], "arguments are required"


def _saves(workshop: Workshop, folder: Path) -> Iterator[Row]:
    save = folder / "save"
    yield ["knnlm", "tune", folder / "nothing"], "is not a save"
    yield ["knnlm", "tune", workshop.store], "is not a save"
    yield ["knnlm", "tune", save, save], "hold the same tokens"
    yield ["knnlm", "tune", save, folder / "save-all"], "different runs"
    yield ["knnlm", "tune", save, "--report", save], "no test result"
    yield ["knnlm", "tune", save, "--without", "cache"], "no memory cache"
    yield ["knnlm", "tune", folder / "save-bare"], "nothing to tune"
    yield ["knnlm", "sweep", save, "--over", "luck"], "there is no knob"
    yield ["knnlm", "sweep", save, "--over", "cache-size"], "no cache was saved"
    yield ["knnlm", "sweep", save, "--over", "k", "--values", "99"], "were saved"
    yield ["knnlm", "sweep", save, "--over", "k", "--values", "1.5"], "whole number"
    yield ["knnlm", "sweep", save, "--over", "k", "--values", "one"], "not a number"
    yield ["knnlm", "sweep", save, "--over", "lambda", "--values", "2"], "between 0 and 1"
    yield ["knnlm", "sweep", save, "--over", "temperature", "--values", "0"], "must be above 0"
    yield ["knnlm", "sweep", save, "--over", "k", "--k", "4"], "would fix what is swept over"
    yield ["knnlm", "sweep", save, "--over", "lambda", "--best-lambda"], "leave out one of the two"
    yield ["knnlm", "sweep", save, "--over", "k", "-o", folder / "x.doc"], "no known kind"
    yield ["knnlm", "sweep", save, "--over", "k", "-o", workshop.model / "x.csv"], "not a folder"
    yield ["knnlm", "sweep", folder / "save-all", "--over", "k"], "there is no k"
    yield ["knnlm", "sweep", folder / "save-all", "--over", "temperature", "--values", "77"], "were saved"


def _texts(workshop: Workshop, folder: Path) -> Iterator[Row]:
    """Commands that load a model."""
    model = ["--path", workshop.model, "--data", workshop.data]
    store = ["--datastore", workshop.store, "--knn-index", "IVF16,SQfp16"]
    yield ["knnlm", "score", "--path", folder / "no.pt", "--data", workshop.data, "/dev/null"], "no checkpoint"
    yield ["knnlm", "score", "--path", workshop.data / "dict.txt", "--data", workshop.data, "/dev/null"], "checkpoint"
    yield ["knnlm", "score", "--path", workshop.model, "--data", folder, "/dev/null"], "dict.txt"
    yield ["knnlm", "score", *model, "/dev/null"], "no text to score"
    yield ["knnlm", "score", *model, folder / "no.txt"], "cannot be read as text"
    yield ["knnlm", "score", *model, workshop.model], "cannot be read as text"
    yield ["knnlm", "score", *model, "--knn-datastore", folder, "/dev/null"], "is not a datastore"
    yield ["knnlm", "inspect", *model, *store, "--text", " "], "--text is empty"
    yield ["knnlm", "inspect", *model, *store], "one of the arguments"
    yield ["knnlm", "inspect", *model, *store, "--split", "nothing"], "there is no split"
    yield ["knnlm", "inspect", *model, *store, "--split", "valid", "--from", -1], "--from must be"
    yield ["knnlm", "inspect", *model, *store, "--split", "valid", "--from", 10**6], "behind its end"
    yield ["knnlm", "inspect", *model, *store, "--split", "valid", "--tokens", 0], "--tokens 1 or more"
    output = ["-o", "/proc/nothing/x.html"]
    yield ["knnlm", "inspect", *model, *store, "--text", "w1", *output], "cannot be written"
    yield ["knnlm", "inspect", *model, *store, "--serve", "--port", 99999], "port"
    yield ["knnlm", "inspect", *model, *store, "--serve", "--host", "8.8.8.8"], "port"


def _imports(workshop: Workshop, folder: Path) -> Iterator[Row]:
    output = ["-o", folder / "new", "--dict", workshop.data / "dict.txt"]
    yield ["knnlm", "import", folder / "nothing", *output], "does not exist"
    yield ["knnlm", "import", workshop.raw, *output, "--dim", 48], "do not fit together"
    yield ["knnlm", "import", workshop.raw, *output, "--key", "brain"], "--key brain is unknown"
    yield ["knnlm", "import", workshop.raw, *output, "--dtype", "int4"], "invalid choice"
    yield ["knnlm", "import", workshop.raw, *output, "--index", workshop.model], "not a FAISS index"
    yield ["knnlm", "import", workshop.raw, "-o", folder / "new", "--dict", workshop.model], "not a fairseq dictionary"
    yield ["knnlm", "import", workshop.raw, "-o", folder / "new", "--dict", folder], "not a fairseq dictionary"
    yield ["knnlm", "import", workshop.raw, "-o", workshop.data, "--dict", workshop.data / "dict.txt"], "not empty"


def _neighbors(workshop: Workshop, folder: Path) -> Iterator[Row]:
    both = ["--datastore", workshop.store, "--queries", workshop.store, "--index", "IVF16,SQfp16"]
    new = ["-o", folder / "new"]
    yield ["knnlm", "neighbors", *both, "--k", 0, *new], "--k must be"
    yield ["knnlm", "neighbors", *both, "--k", 10**9, *new], "--k must be"
    yield ["knnlm", "neighbors", *both, "--nprobe", 0, *new], "--nprobe must be"
    yield ["knnlm", "neighbors", *both, "--window", -1, *new], "--window must be"
    yield ["knnlm", "neighbors", *both, "--k", 3, "-o", folder / "table"], "holds other neighbours"
    yield ["knnlm", "neighbors", *both, "-o", workshop.data], "is not empty"
    yield ["knnlm", "neighbors", *both, "-o", workshop.model], "is a file"
    yield ["knnlm", "neighbors", *both, "--num-shards", 2, "--shard-id", 5, *new], "--shard-id 5 does not exist"
    yield ["knnlm", "neighbors", "--datastore", workshop.store, "--queries", folder, *new], "not a datastore"
    look = ["--data", workshop.data, "--datastore", workshop.store]
    yield ["knnlm", "spalm", "neighbors", folder / "nothing", *look], "is not a"
    yield ["knnlm", "spalm", "neighbors", folder / "table", *look, "--from", 10**7], "--from"
    gains = ["knnlm", "spalm", "gains", folder / "save"]
    yield [*gains, folder / "nothing", "--data", workshop.data], "is not a save"
    yield [*gains, folder / "save-bare", "--data", folder], "dict.txt"
    yield ["knnlm", "spalm", "gains", folder / "save", "--data", workshop.data], "arguments are required"

