"""How fast, beside the published method and stock fairseq, in one run on one machine.

    python -m benchmarks                                             # a small corpus, made as in the demo, into bench/
    python -m benchmarks --data DATA-BIN --path CHECKPOINT --work DIR [--datastore DIR] [PART ...]

Parts: scoring (whole scoring, by command), profile (of a search), search (recall, one query, growth with the number of
entries), growth (a whole split, compact keys), build (both indexes), dump, neighbors (the table for SPALM). What takes
long to make (datastore, indexes) is kept in the work folder and not made again; everything else is measured again. Run
it on a machine that does nothing else, and compare rows of one run.
"""

import argparse
import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

from fairseq_knnlm.report.tables import table
from fairseq_knnlm.storage import write_json

from . import build, dump, growth, neighbors, profile, scoring, search
from .setting import Setting, make_setting

PARTS = ("build", "scoring", "profile", "search", "growth", "dump", "neighbors")
TITLES = {
    "scoring": "Scoring, the median of some rounds in turns: times are for one token; perplexity is that of the first "
    "{part:,} tokens and tuned on them, and that of all of valid with the same flags",
    "profile": "Where the time of a search with k = all goes: all of valid, compact keys, 32 lists and 64 in the far "
    "field",
    "search": "Search alone, on the queries of the first {part:,} tokens; latency of one query",
    "growth": "Growth: every visited entry and the far field, compact keys, all queries of valid at once, the median "
    "of some rounds",
    "build": "Building an index",
    "dump": "Dumping keys, in turns with the bare forward pass",
    "neighbors": "The table of neighbours that SPALM is trained with",
}
MODULES = {
    "scoring": scoring, "profile": profile, "search": search, "growth": growth, "build": build, "dump": dump,
    "neighbors": neighbors,
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--data", type=Path, help="binarised corpus with train and valid (default: make a small one)")
    parser.add_argument("--path", type=Path, help="checkpoint")
    parser.add_argument("--work", type=Path, default=Path("bench"), help="for what is made (default: %(default)s)")
    parser.add_argument("--datastore", type=Path, help="of train; dumped if missing (default: WORK/datastore)")
    parser.add_argument("--tokens", type=int, default=20_000, help="of valid, for slow methods (default: %(default)s)")
    parser.add_argument(
        "--sizes", default="1e6,2.5e6,5e6", help="numbers of entries for the search, besides all (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of whole scoring, in turns (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="JSON file (default: WORK/bench.json)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only write the page of an earlier run beside it")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if bool(args.data) != bool(args.path):
        parser.error("--data and --path belong together")
    return args


def measure(args: argparse.Namespace) -> dict:
    args.work.mkdir(parents=True, exist_ok=True)
    if args.data:
        setting = Setting(args.data, args.path, args.datastore or args.work / "datastore", args.work, args.tokens)
    else:
        setting = make_setting(args.work, args.tokens)
    output = args.output or args.work / "bench.json"
    result = json.loads(output.read_text()) if output.exists() else {}  # of other parts
    result["about"] = {
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "faiss-cpu", "fairseq-fixed", "numpy")},
        "part": args.tokens,
    }
    sizes = [int(float(size)) for size in args.sizes.split(",") if size]
    measures = {
        "scoring": lambda: scoring.measure(setting, args.rounds),
        "profile": lambda: profile.measure(setting),
        "search": lambda: search.measure(setting, sizes),
        "growth": lambda: growth.measure(setting, sizes),
        "build": lambda: build.measure(setting),
        "dump": lambda: dump.measure(setting.data, setting.path, "train", 6),
        "neighbors": lambda: neighbors.measure(setting),
    }
    for part in args.parts or PARTS:
        result[part] = measures[part]()
        write_json(output, result)
        print(f"\n{pages({'about': result['about'], part: result[part]}, markdown=False)}\n", flush=True)
    print(f"all of it is in {output}")
    return result


def pages(result: dict, markdown: bool) -> str:
    """A table for each part."""
    texts = []
    for part in PARTS:
        if part in result:
            title = TITLES[part].format(part=result["about"]["part"])
            header, lines = MODULES[part].table(result[part])
            texts.append(f"{title}.\n\n" + table(header, lines, markdown, left=("", "entries")))
    return "\n\n".join(texts)


def write_page(file: Path) -> None:
    """Markdown beside the JSON file, with what a person has to say of it (``.notes.md``) at the end."""
    result = json.loads(file.read_text())
    about = ", ".join(f"{name} {value}" for name, value in result["about"].items() if name != "part")
    parts = ["# Speed", f"Written by `python -m benchmarks`, from {file.name}. {about}.", pages(result, markdown=True)]
    notes = file.with_suffix(".notes.md")
    if notes.exists():
        parts.append(notes.read_text().strip())
    file.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def main() -> None:
    args = parse()
    warnings.simplefilter("ignore")  # of fairseq and hydra; they would hide the tables
    if args.report:
        write_page(args.report)
    else:
        measure(args)


if __name__ == "__main__":
    main()
