"""The last thing that a person reads of a run: some rows, each of which answers a question."""

from pathlib import Path

from ..data.text_counts import TextCounts
from ..datastore.manifest import Manifest
from ..machine import peak_memory
from ..memory import DatastoreMemory, HeadMemory, Memory
from ..mixture.totals import Totals
from ..progress import human_seconds
from ..search import ListSearch
from ..storage import human_bytes

Rows = list[tuple[str, str]]


def scoring_summary(
    text: str, totals: Totals, memories: list[Memory], save: Path | None, counts: TextCounts | None = None
) -> str:
    """Of a scored text.

    Args:
        text: which one it was
        save: where the run is kept
        counts: words and bytes of the text, where they are known
    """
    rows: Rows = [("text", f"{text}, {totals.tokens:,} tokens")]
    lm, mixture = totals.perplexity("lm"), totals.perplexity("mixture")
    rows.append(("perplexity of the LM", f"{lm:.2f}"))
    if memories:
        rows.append(("perplexity of the mixture", f"{mixture:.2f}  ({mixture / lm - 1:+.1%})"))
        rows.append(("perplexity of the oracle", f"{totals.perplexity('oracle'):.2f}  (per token the best of all)"))
    if counts is not None:
        for name, title in (("lm", "LM"), ("mixture", "mixture")) if memories else (("lm", "LM"),):
            words, bits = counts.per_word(totals.sums[name]), counts.bits_per_byte(totals.sums[name])
            rows.append((f"per word, {title}", f"{words:.2f}  ({bits:.4f} bits per byte)"))
    for number, (memory, hits) in enumerate(zip(memories, totals.hits)):
        if memory.facts.is_head:  # which holds every word
            rows.append((memory.title.removeprefix("in "), totals.lambda_of(number)))
        else:
            settings = f"{totals.lambda_of(number)}, {_settings(memory)}"
            rows.append((f"hit rate {memory.title}", f"{hits / totals.tokens:.1%}  ({settings})"))
    times = {name: seconds for name, seconds in totals.seconds.items() if seconds >= 0.05}
    spent = ", ".join(f"{name} {_precise(seconds)}" for name, seconds in times.items())
    rows.append(("time", f"{_precise(sum(totals.seconds.values()))}  ({spent})" if spent else "next to none"))
    if seconds := sum(totals.seconds.values()):
        rows.append(("speed", f"{totals.tokens / seconds:,.0f} tokens per second"))
    rows.append(("memory", f"{human_bytes(peak_memory())} at most, files that were read among them"))
    if save is not None:
        rows += [("kept in", str(save)), ("next", f"knnlm tune {save}")]
    elif any(isinstance(memory, DatastoreMemory | HeadMemory) for memory in memories):
        rows.append(("next", "score the valid split with --knn-save DIR, then knnlm tune DIR finds better settings"))
    return block("done", rows)


def dump_summary(folder: Path, manifest: Manifest, rows: int, seconds: float, missing: int, indexes: list[str]) -> str:
    """Of a dump.

    Args:
        rows: entries that this process wrote
        seconds: that it took for them
        missing: shards that other processes still have to write
        indexes: what each index is
    """
    table: Rows = [("datastore", f"{folder}" + (f", {missing} shards are still missing" if missing else ""))]
    size = human_bytes(manifest.entries * manifest.entry_bytes)
    table.append(("entries", f"{manifest.entries:,} of {manifest.dim} x {manifest.key_dtype}, {size}"))
    if rows:
        table.append(("written now", f"{rows:,} in {_precise(seconds)}, {rows / seconds:,.0f} tokens per second"))
    table += [("index", index) for index in indexes]
    table.append(("memory", f"{human_bytes(peak_memory())} at most, files that were read among them"))
    table.append(("loss", "a dump computes no loss; score a split with --knn-datastore"))
    if missing:
        table.append(("next", "the other parts: the same command with the other values of --shard-id"))
    else:
        table.append(("next", f"fairseq-eval-lm ... --gen-subset valid --knn-datastore {folder}"))
    return block("done", table)


def block(title: str, rows: Rows) -> str:
    """Aligned rows under a title."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"    {name:<{width}}  {value}" for name, value in rows)])


def _settings(memory: Memory) -> str:
    facts = memory.facts
    if facts.is_cache:
        return f"theta {facts.sharpness:g}, {facts.neighbors:,} positions"
    text = f"temperature {1 / facts.sharpness:g}, k {facts.neighbors or 'all'}"
    if isinstance(memory, DatastoreMemory) and isinstance(memory.engine, ListSearch):
        text += f", {memory.engine.nprobe} lists"
        text += f" and {memory.engine.far} in the far field" if memory.engine.far and facts.neighbors is None else ""
    return text


def _precise(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else human_seconds(seconds)
