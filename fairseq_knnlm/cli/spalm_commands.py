"""``knnlm spalm``: what a trained SPALM does with its memory."""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KnnlmError
from ..storage import make_folder, write_json
from .neighbors_command import describe_shares
from .parsing import CommandParser

if TYPE_CHECKING:
    from fairseq.data import Dictionary

    from ..spalm.analysis import SplitReader


def add_spalm_commands(parser: CommandParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> CommandParser:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(run=run, parser=command)
        command.add_argument("-o", "--output", metavar="DIR", help=f"also write {name}.json and plots (SVG) there")
        return command

    gates = add("gates", _gates, "the values of the gate: histogram, and heat map over a sequence")
    by_k = add("k", _by_k, "perplexity when so many of the neighbours are read")
    for command in (gates, by_k):
        command.add_argument("--path", required=True, metavar="CHECKPOINT", help="of spalm_lm")
        command.add_argument("--data", required=True, metavar="DATA", help="the binarised data")
        command.add_argument("--neighbors", required=True, metavar="DIR", help="as for fairseq-train: DIR/valid, ...")
        command.add_argument("--split", default="valid", help="(default: %(default)s)")
        command.add_argument("--tokens-per-sample", type=int, default=512, help="segment (default: %(default)s)")
        command.add_argument("--memory-size", type=int, help="(default: as trained)")
        _add_range(command, 10000)
    gates.add_argument("--show", type=int, default=60, help="tokens of the heat map (default: %(default)s)")
    by_k.add_argument("--values", metavar="A,B,...", help="(default: 1,2,4,8,16, as far as the table has so many)")

    near = add("neighbors", _show_neighbors, "the retrieved tokens of a text, and how often they are right")
    near.add_argument("table", metavar="DIR", help="of knnlm neighbors")
    near.add_argument("--data", required=True, metavar="DATA", help="folder with dict.txt")
    near.add_argument("--datastore", metavar="DIR", help="also show the contexts that the tokens followed")
    _add_range(near, 40)

    gains = add("gains", _gains, "the tokens to which a model gives more probability than the others do")
    gains.add_argument("save", help="of the model (fairseq-eval-lm --knn-save)")
    gains.add_argument("others", nargs="+", help="saves of the same text by others")
    gains.add_argument("--data", required=True, metavar="DATA", help="folder with dict.txt")
    gains.add_argument("--margin", type=float, default=0.1, help="of the probability (default: %(default)s)")
    gains.add_argument("--show", type=int, default=20, help="how many of them (default: %(default)s)")


def _add_range(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="first token")
    parser.add_argument("--tokens", type=int, default=tokens, metavar="M", help="how many (default: %(default)s)")


def _range(args: argparse.Namespace, total: int) -> tuple[int, int]:
    if not 0 <= args.start < total or args.tokens < 1:
        raise KnnlmError(f"there are {total:,} tokens; give --from 0 to {total - 1} and --tokens 1 or more")
    return args.start, min(args.start + args.tokens, total)


def _reader(args: argparse.Namespace) -> "SplitReader":
    from ..spalm.analysis import SplitReader

    if args.tokens_per_sample < 1:
        raise KnnlmError(f"--tokens-per-sample must be 1 or more, not {args.tokens_per_sample}")
    return SplitReader(args.path, args.data, args.neighbors, args.split, args.tokens_per_sample, args.memory_size)


def _write(args: argparse.Namespace, name: str, content: Any) -> Path | None:
    """The JSON file, where one is asked for; the folder for plots."""
    if args.output is None:
        return None
    folder = Path(args.output)
    make_folder(folder)
    write_json(folder / f"{name}.json", content)
    return folder


def _dictionary(data: str) -> "Dictionary":
    from fairseq.data import Dictionary

    try:
        return Dictionary.load(str(Path(data) / "dict.txt"))
    except (OSError, RuntimeError, ValueError) as error:
        raise KnnlmError(f"{data} has no readable dict.txt ({error}); give the binarised data's folder") from error


def _gates(args: argparse.Namespace) -> int:
    from ..report.tables import table
    from ..spalm.analysis import read_gates
    from ..spalm.gate_plots import heat_map, histogram

    reader = _reader(args)
    gates = read_gates(reader, *_range(args, len(reader)), args.show)
    words = [reader.task.dictionary[token] for token in gates.tokens]
    edges, total = gates.edges, gates.counts.sum()
    fifths = gates.counts.reshape(5, -1).sum(axis=1) / total
    rows = [[f"{n / 5:g} to {(n + 1) / 5:g}", f"{share:.3f}"] for n, share in enumerate(fifths)]
    print(table(["gate", "share of values"], rows))
    print(f"\nmean {gates.means.mean():.3f} over {len(words):,} tokens (1: the network's own state, 0: the neighbours)")
    lowest = np.argsort(gates.means)[:10]
    print("most from the neighbours: " + "  ".join(f"{words[i]} {gates.means[i]:.2f}" for i in lowest))
    shown = gates.values.shape[1]
    content = {
        "tokens": len(words), "mean": float(gates.means.mean()), "counts": gates.counts.tolist(),
        "sequence": [{"token": word, "gate": float(mean)} for word, mean in zip(words[:shown], gates.means)],
    }  # fmt: skip
    if folder := _write(args, "gates", content):
        settings = f"{len(words):,} tokens of {args.split}, mean {gates.means.mean():.3f}"
        histogram(
            folder / "gates-histogram.svg", edges, gates.counts / total, "gate (0: neighbours, 1: own state)",
            "share of values", "How open the gate is", settings,
        )  # fmt: skip
        heat_map(
            folder / "gates-map.svg", gates.values, words[:shown], "dimension of the gate",
            "gate (0: neighbours, 1: own state)", "The gate over a sequence", f"{shown} tokens of {args.split}",
        )  # fmt: skip
    return 0


def _by_k(args: argparse.Namespace) -> int:
    from ..report.plots import plot
    from ..report.tables import table
    from ..spalm.analysis import perplexity_by_k

    try:
        numbers = sorted({int(value) for value in args.values.split(",")}) if args.values else []
    except ValueError as error:
        raise KnnlmError(f"--values takes whole numbers separated by commas, not '{args.values}'") from error
    reader = _reader(args)
    numbers = numbers or [k for k in (1, 2, 4, 8, 16) if k <= reader.k]
    start, stop = _range(args, len(reader))
    found = perplexity_by_k(reader, start, stop, numbers)
    print(table(["K", "perplexity"], [[str(k), f"{value:.2f}"] for k, value in found.items()]))
    trained = reader.decoder.neighbors_used
    print(f"\n{stop - start:,} tokens; one network, trained with K = {trained}, that reads more or fewer at test time")
    rows = [{"k": k, "perplexity": value} for k, value in found.items()]
    if folder := _write(args, "k", {"tokens": stop - start, "trained_k": trained, "rows": rows}):
        plot(
            folder / "k.svg", list(found), {"SPALM": list(found.values())}, "K (neighbours read)",
            "perplexity (per token)", title="Perplexity over the neighbours read", powers_of_two=True,
            settings=f"{stop - start:,} tokens of {args.split}, trained with K = {trained}",
        )  # fmt: skip
    return 0


def _show_neighbors(args: argparse.Namespace) -> int:
    from ..data.neighbor_table import NeighborTable
    from ..datastore import Datastore
    from ..memory.contexts import Contexts
    from ..report.plots import plot
    from ..report.tables import table

    found, dictionary = NeighborTable(args.table), _dictionary(args.data)
    start, stop = _range(args, len(found))
    contexts = None
    if args.datastore:
        datastore = Datastore(args.datastore)
        if datastore.fingerprint != found.facts.datastore_keys:
            raise KnnlmError(f"{args.table} was made from another datastore than {args.datastore}; give that one")
        contexts = Contexts(datastore, dictionary)

    def word(token: int) -> str:
        return dictionary[token] if token >= 0 else "-"

    rows: list[dict[str, Any]] = []
    tokens, ids, distances = found.tokens(start, stop).numpy(), found.ids(start, stop), found.distances(start, stop)
    for number, own in enumerate(found.own_tokens(start, stop).tolist()):
        retrieved: list[dict[str, Any]] = [
            {"token": word(token), "entry": int(entry), "distance": float(distance)}
            for token, entry, distance in zip(tokens[number], ids[number], distances[number])
            if entry >= 0
        ]
        rows.append({"position": start + number, "token": word(own), "neighbors": retrieved})
        if contexts is not None:
            for near in retrieved:
                near["context"] = " ".join(map(word, contexts.before(near["entry"], 8)))
    if contexts is None:
        header = ["position", "token", *(f"neighbour {k}" for k in range(1, found.k + 1))]
        print(table(header, [_neighbor_cells(row, found.k) for row in rows], left=tuple(header[1:])))
    else:
        for row in rows:
            print("  ".join(_neighbor_cells(row, found.k)))
            for near in row["neighbors"]:
                print(f"      ... {near['context']} [{near['token']}]")
    shares = found.shares_of_target()
    print(f"\n(*: the token itself) {describe_shares(shares)}")
    if folder := _write(args, "neighbors", {"shares": shares.tolist(), "rows": rows}):
        numbers = list(range(1, found.k + 1))
        curves = {"the token is among them": shares.tolist()}
        plot(
            folder / "neighbors.svg", numbers, curves, "neighbours, nearest first", "share of positions", log_x=False,
            title="How often the token is among its neighbours", settings=f"{len(found):,} tokens", mark_best=False,
        )  # fmt: skip
    return 0


def _neighbor_cells(row: dict, k: int) -> list[str]:
    """Position, token and its neighbours, those that are right with a star."""
    cells = [near["token"] + ("*" if near["token"] == row["token"] else "") for near in row["neighbors"]]
    return [str(row["position"]), row["token"], *cells, *["-"] * (k - len(cells))]


def _gains(args: argparse.Namespace) -> int:
    from ..report.plots import bar_panels
    from ..report.tables import table
    from ..spalm.analysis import find_gains

    dictionary = _dictionary(args.data)
    gains = find_gains([args.save, *args.others], args.margin)
    names = [Path(folder).name for folder in (args.save, *args.others)]

    def facts(place: int) -> dict:
        before = " ".join(dictionary[token] for token in gains.tokens[max(0, place - 8) : place])
        chances = {name: float(p) for name, p in zip(names, gains.probabilities[:, place])}
        return {"position": int(place), "token": dictionary[gains.tokens[place]], "context": before, **chances}

    content = {"tokens": len(gains.tokens), "margin": args.margin}
    panels = {}
    for which, places in (("better", gains.better), ("worse", gains.worse)):
        rows = [facts(place) for place in places]
        often = Counter(row["token"] for row in rows).most_common(12)
        content[which] = {"count": len(rows), "most_frequent": dict(often), "rows": rows[: args.show]}
        print(
            f"{len(rows):,} of {len(gains.tokens):,} tokens are {which} by more than {args.margin:g} in {names[0]} "
            f"than in {' and '.join(names[1:])}"
        )
        if rows:
            header = [*names, "context", "token"]
            lines = [[*(f"{row[n]:.2f}" for n in names), row["context"], row["token"]] for row in rows[: args.show]]
            print(table(header, lines, left=("token",)) + "\n")
            panels[f"{which} by more than {args.margin:g}"] = ([n for n, _ in often], [float(c) for _, c in often])
    if (folder := _write(args, "gains", content)) and panels:
        settings = f"{len(gains.tokens):,} tokens; {names[0]} against {' and '.join(names[1:])}; the 12 most frequent"
        bar_panels(folder / "gains.svg", panels, "tokens", title="Tokens that gain and lose", settings=settings)
    return 0
