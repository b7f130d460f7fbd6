"""Writes docs/reference/flags.md and docs/reference/commands.md from the code, so that neither can go stale.

    python tools/reference.py            writes both pages
    python tools/reference.py --check    fails if one of them is not what the code says

The flags come from the dataclasses that fairseq reads them from, the commands from the parsers that answer --help.
"""

import argparse
import contextlib
import os
import re
import sys
from dataclasses import MISSING, Field, fields
from enum import EnumMeta
from pathlib import Path
from typing import Any, get_args
from unittest import mock

REPOSITORY = Path(__file__).resolve().parent.parent
REFERENCE = REPOSITORY / "docs" / "reference"
WRITTEN = "<!-- Written by python tools/reference.py from the code: change the code, not this page. -->"

# The order of the page. A flag that is missing here is not lost: it comes at the end, under "Other flags".
GROUPS = {
    "Memorise": ["dump", "dry_run", "key", "layer", "key_dtype", "key_dim"],
    "Index": ["index", "metric"],
    "Score with datastores": [
        "datastore", "preset", "lambda", "temperature", "k", "nprobe", "far", "device", "engine", "ray_address", "mask",
        "score",
    ],
    "Mix in learned heads": ["head", "head_lambda"],
    "Continuous cache": ["cache_size", "cache_lambda", "cache_theta", "cache_boundary"],
    "Weights by context": ["gate", "gate_skip"],
    "Keep": ["save", "save_top"],
}  # fmt: skip
# Where a flag is explained at length.
EXPLAINED = {
    "dump": ("the tutorial", "../tutorial.md#2-memorise-the-training-text"),
    "key": ("keys", "../concepts.md#keys"),
    "key_dim": ("compact keys", "../scaling.md#compact-keys"),
    "key_dtype": ("compact keys", "../scaling.md#compact-keys"),
    "index": ("indexes", "../concepts.md#the-index"),
    "datastore": ("several datastores", "../concepts.md#several-datastores"),
    "k": ("how many neighbours", "../concepts.md#k-how-many-neighbours"),
    "lambda": ("lambda", "../concepts.md#lambda-how-much-to-trust-retrieval"),
    "temperature": ("temperature", "../concepts.md#temperature-how-sharp-the-neighbours-are"),
    "nprobe": ("the index", "../concepts.md#the-index"),
    "far": ("the far field", "../concepts.md#the-far-field"),
    "device": ("GPUs", "../scaling.md#gpus"),
    "head": ("learned heads", "../learned.md"),
    "engine": ("more than one machine", "../cluster.md"),
    "ray_address": ("more than one machine", "../cluster.md"),
    "cache_size": ("the continuous cache", "../concepts.md#the-continuous-cache"),
    "save": ("tuning", "../tuning.md"),
    "gate": ("weights by context", "../gate.md"),
    "gate_skip": ("leaving out searches", "../gate.md#leaving-out-searches"),
    "save_top": ("the LM's most probable tokens", "../explanations.md#the-lms-most-probable-tokens"),
}
CODE = re.compile(
    r"(?<![\w-])(knnlm [a-z]+(?: --[a-z-]+)?|--[a-z][a-z-]*[a-z]|[A-Za-z0-9]\w*_[\w.]*\w|dict\.txt|fairseq-[a-z-]+)"
    r"(?![\w-])"
)
TYPES = {str: "text", int: "a whole number", float: "a number"}


# --- flags ----------------------------------------------------------------------------------------------------------


def knn_flags() -> dict[str, Field]:
    """Every --knn- flag of the task, by its name without the prefix."""
    from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig

    found = {flag.name: flag for flag in fields(KNNLanguageModelingConfig)}
    return {name.removeprefix("knn_"): flag for name, flag in found.items() if name.startswith("knn_")}


def flags_page() -> str:
    from fairseq_knnlm.criterions.prototype_elbo import PrototypeELBOConfig
    from fairseq_knnlm.criterions.soft_labels import SoftLabelsConfig
    from fairseq_knnlm.models.spalm_lm import SPALMConfig
    from fairseq_knnlm.models.sparse_editor import SparseEditorConfig
    from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig
    from fairseq_knnlm.tasks.spalm import SPALMTaskConfig
    from fairseq_knnlm.tasks.sparse_prototypes import SparsePrototypesConfig

    flags = knn_flags()
    listed = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "Other flags": [name for name in flags if name not in listed]}
    lines = [
        "# Flags",
        "",
        WRITTEN,
        "",
        "What `--user-dir` adds to `fairseq-eval-lm`, `fairseq-interactive` and `fairseq-generate` with `--task "
        "knn_language_modeling`. Without any of these flags the task gives the stock numbers. `knnlm score`, `knnlm "
        "inspect` and `KNNLM.from_pretrained` take those that have a meaning there.",
    ]
    for title, names in groups.items():
        present = [name for name in names if name in flags]
        if present:
            lines += ["", f"## {title}"]
            for name in present:
                lines += ["", *_flag_entry(flags[name], EXPLAINED.get(name))]
    inherited = {flag.name for flag in fields(KNNLanguageModelingConfig)}
    task = [flag for flag in fields(SPALMTaskConfig) if flag.name not in inherited]
    model = [flag for flag in fields(SPALMConfig) if flag.metadata.get("help")]
    lines += [
        "",
        "## SPALM",
        "",
        "With `--task spalm`, and for `fairseq-train` with `--arch spalm_lm` or `--arch transformer_xl_lm`; "
        "see [SPALM](../spalm.md).",
    ]
    for flag in task + model:
        lines += ["", *_flag_entry(flag, None)]
    lines += [
        "",
        "## Soft labels",
        "",
        "For `fairseq-train` with `--task knn_language_modeling --criterion soft_labels`; see "
        "[soft labels](../explanations.md#soft-labels).",
    ]
    for flag in fields(SoftLabelsConfig):
        if flag.metadata.get("help"):
            lines += ["", *_flag_entry(flag, None)]
    lines += [
        "",
        "## Sparse prototypes",
        "",
        "For `fairseq-train` with `--task sparse_prototypes --arch sparse_editor --criterion prototype_elbo`; see "
        "[sparse prototypes](../prototypes.md). `--dropout` is on words and states of the editor.",
    ]
    for config in (SparsePrototypesConfig, SparseEditorConfig, PrototypeELBOConfig):
        for flag in fields(config):
            # --data is no flag of the command line; --dropout is among SPALM's, and a page has an anchor once.
            if flag.metadata.get("help") and flag.name not in ("data", "dropout"):
                lines += ["", *_flag_entry(flag, None)]
    return "\n".join(lines) + "\n"


def _flag_entry(flag: Field, explained: tuple[str, str] | None) -> list[str]:
    text = _sentence(str(flag.metadata.get("help", "")))
    facts = ["A switch, without a value." if flag.type is bool else f"Takes {_type_of(flag)}."]
    default = flag.default if flag.default is not MISSING else None
    if default is not None and default is not False and "(default" not in text:
        facts.append(f"Default: `{default}`.")
    if explained:
        facts.append("More: [{}]({}).".format(*explained))
    name = flag.name.replace("_", "-")
    # The anchor is written out, because Python-Markdown and GitHub make different ones of a heading with dashes.
    return [f'<a id="{name}"></a>', "", f"### `--{name}`", "", text, "", " ".join(facts)]


def _type_of(flag: Field) -> str:
    kind: Any = flag.type
    for inner in get_args(kind):  # Optional[X]
        if inner is not type(None):
            kind = inner
    if isinstance(kind, EnumMeta):
        choices: list[Any] = list(kind)
        return "one of " + ", ".join(f"`{choice.value}`" for choice in choices)
    return TYPES.get(kind, "text")


def _markdown(text: str) -> str:
    """A help text for a page: flags and names of files and fields as code, and what Markdown would read as markup."""
    text = " ".join(text.split()).removesuffix(" (default: None)")
    parts = CODE.split(text)  # every second one is code
    plain = [part.replace("<", "&lt;").replace("*", "\\*").replace("|", "\\|") for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]] + [""]
    return "".join(before + word for before, word in zip(plain, code))


def _sentence(text: str) -> str:
    text = _markdown(text[:1].upper() + text[1:])
    return text if text.endswith((".", "?", "!")) or not text else f"{text}."


# --- commands -------------------------------------------------------------------------------------------------------


class _Helped(Exception):
    """A parser was asked for its help."""


def parser_of(*words: str) -> argparse.ArgumentParser:
    """The parser that answers ``knnlm WORDS --help``, however the command comes by it."""
    from fairseq_knnlm import cli

    asked = []

    def remember(parser: argparse.ArgumentParser, *_: Any) -> None:
        asked.append(parser)
        raise _Helped

    with mock.patch.object(argparse.ArgumentParser, "print_help", remember), contextlib.suppress(_Helped):
        cli.main([*words, "--help"])
    return asked[0]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Name -> what it does."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {choice.dest: choice.help or "" for choice in action._choices_actions}
    return found


def all_commands() -> dict[str, argparse.ArgumentParser]:
    """Every command, "spalm gates" among them, with its parser."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name in subcommands(parser_of()):
        parser = parser_of(name)
        inner = subcommands(parser)
        found |= {f"{name} {what}": parser_of(name, what) for what in inner} if inner else {name: parser}
    return found


def commands_page() -> str:
    commands = all_commands()
    lines = [
        "# Commands",
        "",
        WRITTEN,
        "",
        "What has no place in a fairseq command is a command of `knnlm`. `knnlm COMMAND --help` prints what this page "
        "says. What `fairseq-eval-lm` calls `--knn-NAME` may be given here as `--NAME` or as `--knn-NAME`. Every "
        "command exits with 0 if it did what was asked, and otherwise prints one sentence that names the remedy.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    for name, parser in commands.items():
        anchor = "knnlm-" + name.replace(" ", "-")
        lines.append(f"| [`knnlm {name}`](#{anchor}) | {_sentence(parser.description or '')} |")
    for name, parser in commands.items():
        lines += ["", f"## `knnlm {name}`", "", _sentence(parser.description or ""), "", *_usage(name, parser)]
        rows = [_argument_row(action) for action in _arguments(parser)]
        if rows:
            lines += ["", "| argument | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    return [action for action in shown if not isinstance(action, argparse._HelpAction)]


def _usage(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """What must be given; everything else is in the table."""
    arguments = _arguments(parser)
    words = [_value(action) for action in arguments if not action.option_strings]
    words += [_spelling(action) for action in arguments if action.option_strings and action.required]
    for group in parser._mutually_exclusive_groups:
        if group.required:
            words.append("(" + " | ".join(_spelling(action) for action in group._group_actions) + ")")
    rest = any(action.option_strings and not action.required for action in arguments)
    return [f"    knnlm {' '.join([name, *words, *(['[options]'] if rest else [])])}"]


def _value(action: argparse.Action) -> str:
    """DIR, [FILE], DIR...: what a person types for an argument; empty for a switch."""
    if action.option_strings and action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        word = action.metavar
    elif action.choices:
        word = "|".join(map(str, action.choices))
    else:
        word = {int: "N", float: "X"}.get(action.type) or action.dest.upper().removeprefix("KNN_")  # type: ignore
    if action.nargs in ("+", "*"):
        word += "..."
    # A positional argument whose default is suppressed may also be given as a flag, but it has to be given.
    optional = action.nargs == "*" or (action.nargs == "?" and action.default is not argparse.SUPPRESS)
    return f"[{word}]" if optional else word


def _spelling(action: argparse.Action) -> str:
    return f"{action.option_strings[-1]} {_value(action)}".strip()


def _argument_row(action: argparse.Action) -> str:
    names = [f"`{name}`" for name in action.option_strings] or [f"`{_value(action)}`"]
    value = _value(action).replace("|", "\\|") if action.option_strings else ""
    text = str(action.help or "")
    if "%(" in text:
        text = text % {"default": action.default, "prog": "knnlm"}
    notes = [_markdown(text)] if text else []
    is_switch = action.nargs == 0
    if action.required and action.option_strings:
        notes.append("required")
    elif "default" not in text and not is_switch and action.default not in (None, "", [], argparse.SUPPRESS):
        notes.append(f"default: `{action.default}`")
    return f"| {', '.join(names)}{f' `{value}`' if value else ''} | {'; '.join(notes)} |"


# --- both -----------------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """What the pages should say."""
    return {REFERENCE / "flags.md": flags_page(), REFERENCE / "commands.md": commands_page()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is not current")
    args = parser.parse_args(arguments)
    stale = []
    for path, text in pages().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(REPOSITORY))
        if not args.check:
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is not current; run python tools/reference.py" if args.check else f"wrote {name}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    sys.exit(main())
