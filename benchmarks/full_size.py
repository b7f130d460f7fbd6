"""The paper's size on this machine: 103,227,021 keys of 1,024 dimensions, dumped compactly, indexed and searched.

    python -m benchmarks.full_size --datastore DIR --queries DIR --work DIR [--entries N] [--key-dim D] [PART ...]

No text of that size is at hand, so the keys are made from real ones: those of a datastore (of --datastore), as often as
needed, with noise at the scale of neighbour distances, mapped to 1,024 dimensions by a fixed orthonormal matrix. They
go through the writer that a dump uses. Queries are those of another datastore (a dump of the split that is scored),
mapped likewise. Parts: dump, build, score, disk (the same search when nothing of the index is in memory, beside reading
it from end to end), check; what is done is not done again.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from fairseq_knnlm.datastore import Datastore, DatastoreWriter, Manifest, plan_shards
from fairseq_knnlm.datastore.key_codec import SAMPLE_ROWS, KeyForm, learn_codec
from fairseq_knnlm.datastore.list_file import ListFile
from fairseq_knnlm.index import build_index, index_file
from fairseq_knnlm.memory.engines import make_engine
from fairseq_knnlm.progress import progress
from fairseq_knnlm.report.tables import table
from fairseq_knnlm.search import ExactSearch
from fairseq_knnlm.storage import write_json, write_text

ENTRIES = 103_227_021  # of WikiText-103, as in Khandelwal et al. 2020
QUERIES = 217_646  # its validation set
SOURCE_DIM = 1024
SHARD_ROWS = 1 << 18
ROWS = 1 << 14
POOL = 1 << 14  # rows of noise, which are used in different orders and with different signs
PARTS = ("dump", "build", "score", "disk", "check")
FEW = 50  # one query in so many, of those that are searched for when the disk is what counts
READ_BYTES = 1 << 23
SLOW_DISK = 5e8  # bytes a second, such as SATA allows


class MadeUpKeys:
    """States of 1,024 dimensions: real ones, again and again with other noise."""

    def __init__(self, source: Datastore, noise: float, seed: int = 1):
        rng = np.random.default_rng(seed)
        self._source = source
        basis, _ = np.linalg.qr(rng.normal(size=(SOURCE_DIM, source.dim)))
        self._basis = np.ascontiguousarray(basis.T, np.float32)  # (dim, 1024) with orthonormal rows
        self._pool = rng.standard_normal((POOL, source.dim), np.float32) * np.float32(noise)

    def widen(self, keys: np.ndarray) -> np.ndarray:
        """(n, dim) -> (n, 1024)."""
        return keys.astype(np.float32) @ self._basis

    def states(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """States (n, 1024) and values (n,) of the entries [start, stop), which lie in one copy of the source."""
        copy, first = divmod(start, len(self._source))
        last = first + stop - start
        keys = self._source.read_keys(first, last).astype(np.float32)
        if copy:
            rng = np.random.default_rng([copy, first])
            keys += self._pool[rng.integers(0, POOL, len(keys))] * rng.choice(np.float32([-1, 1]), (1, keys.shape[1]))
        return self.widen(keys), self._source.read_values(first, last)


def neighbor_scale(source: Datastore) -> float:
    """The noise per dimension that is as long as a key's distance to its nearest neighbour, from a sample."""
    firsts = np.linspace(0, len(source) - 1025, 256).astype(int)
    parts = [source.read_keys(first, first + 1024) for first in firsts.tolist()]
    keys = torch.from_numpy(np.concatenate(parts).astype(np.float32))
    queries = keys[:: len(keys) // 200]
    distances = torch.cdist(queries, keys).square()
    distances[distances < 1e-3] = torch.inf  # itself
    return float((distances.amin(dim=1).median() / source.dim).sqrt())


def dump(source: Datastore, folder: Path, entries: int, key_dim: int) -> dict:
    """Write the datastore through the real writer; how it went."""
    keys = MadeUpKeys(source, neighbor_scale(source))
    # no shard spans two copies of the source
    rows = [
        min(SHARD_ROWS, len(source) - first % len(source), entries - first)
        for first in _starts(entries, len(source))
    ]  # fmt: skip
    form = KeyForm(SOURCE_DIM, key_dim, "int8")
    manifest = Manifest(
        **form.facts(), entries=entries, value_dtype=source.manifest.value_dtype, key="ffn_input_ln",
        layer=source.manifest.layer, source={"made_of": source.fingerprint,
                                            "dictionary_size": source.manifest.source["dictionary_size"]},
        shards=plan_shards(rows),
    )  # fmt: skip

    def make_codec():
        pieces = np.linspace(0, len(source) - ROWS // 16, SAMPLE_ROWS // (ROWS // 16)).astype(int)
        states = [keys.states(int(first), int(first) + ROWS // 16)[0] for first in pieces]
        return learn_codec(np.concatenate(states), form)

    writer = DatastoreWriter(folder, manifest, make_codec)
    with progress("dumping", entries, " keys") as bar:
        for shard in writer.missing_shards():
            output = writer.open_shard(shard)
            for start in range(shard.start, shard.stop, ROWS):
                states, values = keys.states(start, min(start + ROWS, shard.stop))
                output.append(states, values)
                bar.update(len(values))
            output.commit()
    writer.finish()
    store = Datastore(folder)
    kept = store.manifest.projection
    return {"entries": entries, "bytes": store.bytes_on_disk, "variance_kept": kept.variance_kept if kept else 1.0}


def _starts(entries: int, period: int) -> list[int]:
    starts, first = [], 0
    while first < entries:
        starts.append(first)
        first += min(SHARD_ROWS, period - first % period, entries - first)
    return starts


def build(folder: Path) -> dict:
    info = build_index(Datastore(folder), "auto", "l2")
    return {"factory": info.factory, "bytes": info.bytes}


def load_queries(source: Datastore, asked: Datastore, folder: Path) -> tuple[Datastore, np.ndarray, np.ndarray]:
    """The datastore, queries as it has its keys (n, dim), and their targets (n,)."""
    store, count = Datastore(folder), min(QUERIES, len(asked))
    widened = MadeUpKeys(source, 0.0).widen(asked.read_keys(0, count))
    return store, store.codec.project(widened), asked.read_values(0, count).astype(np.int64)


def score(source: Datastore, asked: Datastore, folder: Path, nprobe: int, far: int, temperature: float) -> dict:
    store, queries, targets = load_queries(source, asked, folder)
    engine = make_engine(store, build_index(store, "auto", "l2"), None, "l2", "index", "exact", nprobe, far)
    started = time.perf_counter()
    target, total = engine.target_mass(queries, targets, [temperature])
    seconds = time.perf_counter() - started
    share = np.exp(target - total)[0]
    return {
        "queries": len(queries), "nprobe": nprobe, "far": far, "seconds_of_search": seconds,
        "queries_per_second": len(queries) / seconds, "mean_p_of_target": float(share.mean()),
    }  # fmt: skip


def disk(source: Datastore, asked: Datastore, folder: Path, nprobe: int, far: int, temperature: float) -> dict:
    """Search when nothing of the index is in memory: for all queries, and for few, when reading is what takes time."""
    store, queries, targets = load_queries(source, asked, folder)
    info = build_index(store, "auto", "l2")
    path = index_file(store, info.name)
    forget(path)
    started = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(READ_BYTES):
            pass
    bandwidth = info.bytes / (time.perf_counter() - started)
    result = {"bytes": info.bytes, "sequential_bytes_per_second": bandwidth}
    for name, step in (("all", 1), ("few", FEW)):
        engine = make_engine(store, info, None, "l2", "index", "exact", nprobe, far)
        forget(path)
        before, started = read_bytes(), time.perf_counter()
        engine.target_mass(queries[::step], targets[::step], [temperature])
        seconds = time.perf_counter() - started
        result[name] = {
            "queries": len(queries[::step]), "seconds": seconds, "bytes_read": read_bytes() - before,
            "share_of_bandwidth": (read_bytes() - before) / seconds / bandwidth,
            "times_a_pass_of_the_disk": seconds / (info.bytes / bandwidth),
        }  # fmt: skip
    engine = make_engine(store, info, None, "l2", "index", "exact", nprobe, far)
    with slow_reads(SLOW_DISK) as read:
        started = time.perf_counter()
        engine.target_mass(queries[::FEW], targets[::FEW], [temperature])
        seconds = time.perf_counter() - started
    result["slow"] = {
        "queries": len(queries[::FEW]), "bytes_per_second": SLOW_DISK, "seconds": seconds, "bytes_read": read[0],
        "share_of_bandwidth": read[0] / seconds / SLOW_DISK,
    }  # fmt: skip
    return result


@contextmanager
def slow_reads(bytes_per_second: float) -> Iterator[list[int]]:
    """Reads of lists take as long as from a disk of such a speed; gives how many bytes were read."""
    original, read = ListFile.read, [0]

    def slowly(self: ListFile, first: int, last: int) -> np.ndarray:
        started = time.perf_counter()
        data = original(self, first, last)
        read[0] += data.nbytes
        time.sleep(max(0.0, data.nbytes / bytes_per_second - (time.perf_counter() - started)))
        return data

    ListFile.read = slowly  # type: ignore[method-assign]
    try:
        yield read
    finally:
        ListFile.read = original  # type: ignore[method-assign]


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    """What this process has read from disks so far."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def check(
    source: Datastore, asked: Datastore, folder: Path, nprobe: int, far: int, temperature: float, count: int
) -> dict:
    """Mass against the exact sum over all entries, and recall of the 1,024 nearest, for some queries."""
    store, queries, targets = load_queries(source, asked, folder)
    some = np.linspace(0, len(queries) - 1, count).astype(int)
    queries, targets = queries[some], targets[some]
    info, exact = build_index(store, "auto", "l2"), ExactSearch(store, "l2")
    truth_target, truth_total = (sums[0] for sums in exact.target_mass(queries, targets, [temperature]))
    result = {"queries": count, "temperature": temperature}
    for name, lists in (("visited", 0), ("visited and far", far)):
        engine = make_engine(store, info, None, "l2", "index", "exact", nprobe, lists)
        target, total = (sums[0] for sums in engine.target_mass(queries, targets, [temperature]))
        result[f"share of the mass, {name}"] = float(np.exp(total - truth_total).mean())
        difference = np.exp(target - total) - np.exp(truth_target - truth_total)
        result[f"mean difference of p, {name}"] = float(np.abs(difference).mean())
    few = queries[: max(1, count // 10)]
    engine = make_engine(store, info, 1024, "l2", "index", "exact", nprobe)
    found, truth = engine.search(few, 1024)[1], exact.search(few, 1024)[1]
    result["recall of the 1,024 nearest"] = float(
        np.mean([len(np.intersect1d(a, b)) / len(b) for a, b in zip(found, truth)])
    )
    return result


def page(results: dict, growth: dict | None = None) -> str:
    """Markdown: each step's time, memory and bytes, what 3 billion entries would take, and the checks.

    Args:
        growth: what ``python -m benchmarks growth`` has measured of smaller datastores with as many lists a query
    """
    entries = results["dump"]["entries"]
    steps = {"dump": "dump, 128 x int8 of 1,024 dimensions", "build": "build", "score": "search for all queries"}
    lines = [
        [what, f"{results[step]['seconds']:,.0f} s", f"{results[step]['peak_memory'] / 2**30:.2f} GiB",
         f"{results[step]['bytes'] / 1e9:.1f} GB" if "bytes" in results[step] else "",
         f"{3e9 / entries * results[step]['seconds'] / 3600:.1f} h" if step != "score" else "",
         f"{3e9 / entries * results[step]['bytes'] / 1e9:,.0f} GB" if "bytes" in results[step] else ""]
        for step, what in steps.items()
    ]  # fmt: skip
    header = ["", "time", "peak memory", "on disk", "time for 3 billion", "on disk for 3 billion"]
    score, checked = results["score"], results["check"]
    facts = [
        f"Index: `{results['build']['factory']}`.",
        f"Search: {score['queries']:,} queries, {score['nprobe']} lists and {score['far']} in the far field, "
        f"{score['seconds_of_search']:,.0f} s without opening the index: {score['queries_per_second']:,.0f} a second.",
        f"The projection keeps {results['dump']['variance_kept']:.1%} of the variance.",
    ]
    if growth is not None:
        facts.append(_growth(entries, 1e6 / score["queries_per_second"], growth))
    if "disk" in results:
        facts += _disk_facts(results["disk"])
    checks = [[name, f"{value:.4g}"] for name, value in checked.items() if name not in ("seconds", "peak_memory")]
    return "\n\n".join([
        "# The paper's size on an ordinary machine",
        f"Written by `python -m benchmarks.full_size` from scale.json: {entries:,} keys of 1,024 dimensions, made from "
        "real ones as its help says. What 3 billion entries would take is this times their number, by arithmetic.",
        table(header, lines, markdown=True, left=("",)), "\n".join(f"- {fact}" for fact in facts),
        "Beside exact search over all entries:",
        table(["", "value"], checks, markdown=True, left=("",)),
    ]) + "\n"  # fmt: skip


def _growth(entries: int, us: float, growth: dict) -> str:
    """How much longer a query takes than with the fewest and the most entries of the other benchmark."""
    rows = {int(size): row["us"] for size, row in growth["rows"].items()}
    parts = [
        f"{us / rows[size]:.1f} times as long as with {size:,} entries (entries to the power of "
        f"{np.log(us / rows[size]) / np.log(entries / size):.2f})"
        for size in (min(rows), max(rows))
    ]
    return f"A query takes {us:.0f} us: " + " and ".join(parts) + "."


def _disk_facts(disk: dict) -> list[str]:
    sentences = [
        f"With nothing of the index in memory: {row['queries']:,} queries take {row['seconds']:,.0f} s and read "
        f"{row['bytes_read'] / 1e9:.1f} GB, at {row['share_of_bandwidth']:.0%} of the disk's speed; that is "
        f"{row['times_a_pass_of_the_disk']:.2f} times as long as reading the file once."
        for row in (disk["all"], disk["few"])
    ]
    facts = [f"The disk reads {disk['sequential_bytes_per_second'] / 1e6:,.0f} MB a second in order.", *sentences]
    if slow := disk.get("slow"):
        facts.append(
            f"With every read slowed down to {slow['bytes_per_second'] / 1e6:,.0f} MB a second, {slow['queries']:,} "
            f"queries take {slow['seconds']:,.0f} s and read {slow['bytes_read'] / 1e9:.1f} GB, at "
            f"{slow['share_of_bandwidth']:.0%} of that speed."
        )
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.full_size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--datastore", type=Path, help="of real keys")
    parser.add_argument("--queries", type=Path, help="a datastore of the split that is scored")
    parser.add_argument("--work", type=Path, default=Path("full-size"), help="for what is made (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only write the page of an earlier run beside it")
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--nprobe", type=int, default=32)
    parser.add_argument("--far", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=9.0)
    parser.add_argument("--checked", type=int, default=1000, help="queries that are compared with exact search")
    args = parser.parse_args()
    if args.report:
        write_page(args.report)
        return
    if not (args.datastore and args.queries):
        parser.error("give --datastore and --queries")
    args.work.mkdir(parents=True, exist_ok=True)
    source, asked, folder = Datastore(args.datastore), Datastore(args.queries), args.work / "store"
    setting = (args.nprobe, args.far, args.temperature)
    steps: dict[str, Callable[[], dict]] = {
        "dump": lambda: dump(source, folder, args.entries, args.key_dim),
        "build": lambda: build(folder),
        "score": lambda: score(source, asked, folder, *setting),
        "disk": lambda: disk(source, asked, folder, *setting),
        "check": lambda: check(source, asked, folder, *setting, args.checked),
    }
    output = args.work / "full_size.json"
    results = json.loads(output.read_text()) if output.exists() else {}
    for part in args.parts or PARTS:
        results[part] = measured(steps[part])
        write_json(output, results)
        print(part, json.dumps(results[part], indent=1), flush=True)


def write_page(file: Path) -> None:
    """Markdown beside the JSON file, with what a person has to say of it (``.notes.md``) at the end."""
    speed = file.with_name("speed.json")  # of python -m benchmarks, if it is there
    growth = json.loads(speed.read_text()).get("growth") if speed.exists() else None
    text, notes = page(json.loads(file.read_text()), growth), file.with_suffix(".notes.md")
    write_text(file.with_suffix(".md"), text + (f"\n{notes.read_text().strip()}\n" if notes.exists() else ""))


def measured(step: Callable[[], dict]) -> dict:
    """What a step says, and its time and peak memory, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        started = time.perf_counter()
        result = step()
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result |= {"seconds": time.perf_counter() - started, "peak_memory": peak}
        with os.fdopen(write, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit("the step failed; see above")
    return json.loads(text)


if __name__ == "__main__":
    main()
