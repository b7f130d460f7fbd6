"""The documentation: what is generated is current, what is linked exists, what is shown runs."""

import argparse
import ast
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from commands import REPO, eval_lm_here
from fairseq import options
from tiny import make_data, make_lines, make_model

import fairseq_knnlm.tasks.knn_language_modeling  # noqa: F401  registers the task whose flags are looked at
from fairseq_knnlm.data.neighbor_table import NeighborFacts
from fairseq_knnlm.datastore.key_codec import Projection, Quantizer
from fairseq_knnlm.datastore.manifest import Manifest, Shard
from fairseq_knnlm.heads import HeadFacts
from fairseq_knnlm.index.info import IndexInfo
from fairseq_knnlm.memory.base import MemoryFacts
from fairseq_knnlm.mixture.gate import GateFacts, GateMemory
from fairseq_knnlm.prototypes.embeddings import EmbeddingFacts
from fairseq_knnlm.saved_runs.format import RunFacts
from fairseq_knnlm.tasks.spalm import SPALMTaskConfig
from tools import reference

DOCS = REPO / "docs"
SITE = sorted(DOCS.rglob("*.md"))
PAGES = [REPO / "README.md", REPO / "CHANGELOG.md", *SITE, *sorted((REPO / "examples").rglob("*.md"))]
WRITTEN_BY_HAND = [page for page in [REPO / "README.md", *SITE] if "results" not in page.relative_to(REPO).as_posix()]

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}.*\n?)+", re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(REPO).as_posix()


# --- what is generated ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    return reference.pages()


def test_the_reference_is_current(generated):
    stale = [name_of(page) for page, text in generated.items() if text_of(page) != text]
    assert not stale, "run python tools/reference.py"


def test_every_flag_is_in_the_reference(generated):
    """As fairseq-eval-lm itself understands them."""
    arguments = ["data", "--path", "x", "--task", "knn_language_modeling"]
    parsed = options.parse_args_and_arch(options.get_eval_lm_parser(), arguments)
    flags = {f"--{name.replace('_', '-')}" for name in vars(parsed) if name.startswith("knn_")}
    documented = re.findall(r"^### `(--knn-\S+)`$", generated[reference.REFERENCE / "flags.md"], re.MULTILINE)
    flags |= {f"--{name.name.replace('_', '-')}" for name in fields(SPALMTaskConfig) if name.name.startswith("knn_")}
    assert len(flags) > 20 and set(documented) == flags and len(documented) == len(flags)


def test_every_command_and_its_options_are_in_the_reference(generated):
    page = generated[reference.REFERENCE / "commands.md"]
    sections = dict(re.findall(r"^## `knnlm (.+?)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert {"build", "info", "tune", "score", "inspect", "spalm gates"} <= set(sections)
    for name, parser in reference.all_commands().items():
        for action in parser._actions:
            for option in action.option_strings if action.help != argparse.SUPPRESS else ():
                assert option in ("-h", "--help") or f"`{option}`" in sections[name], (name, option)


def test_a_flag_that_no_group_names_is_not_lost(monkeypatch):
    monkeypatch.setattr(reference, "GROUPS", {"Memorise": ["dump", "of_the_future"]})
    page = reference.flags_page()
    assert "## Other flags" in page and "### `--knn-k`" in page and page.count("### `--knn-dump`") == 1


# --- links ----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What a link can point to in a page: its headings, as GitHub and MkDocs name them, and anchors in HTML."""
    text = FENCED.sub("", text_of(page))
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = INDENTED.sub("", FENCED.sub("", text_of(page)))
    for link in LINK.findall(text):
        if re.match("(https|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} does not exist"
        if page in SITE:
            assert target.is_relative_to(DOCS), f"{link} leaves docs/, so it has no page in the site"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link} has no such heading"


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((REPO / "mkdocs.yml").read_text())

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages(child)]

    listed = pages(config["nav"])
    assert len(listed) == len(set(listed)) and all((DOCS / page).is_file() for page in listed)
    parts_of_results = {page.relative_to(DOCS).as_posix() for page in (DOCS / "results").glob("*.md")}
    everything = {page.relative_to(DOCS).as_posix() for page in SITE}
    assert everything - set(listed) <= parts_of_results


def test_the_site_fetches_nothing():
    config = yaml.safe_load((REPO / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert "://" not in (DOCS / "site.css").read_text()
    for page in SITE:
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|iframe|link)\b|```mermaid", text_of(page)), page


# --- what is said ---------------------------------------------------------------------------------------------------

OF_FAIRSEQ_ENCODERS = {"--sentencepiece-model", "--bpe-codes"}  # whatever --bpe takes with it


def test_every_flag_that_the_docs_name_exists():
    parsers = [*reference.all_commands().values(), options.get_training_parser("spalm"), options.get_eval_lm_parser()]
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    known |= {f"--{name}" for name in re.findall(r'<a id="([^"]+)">', text_of(DOCS / "reference/flags.md"))}
    known |= {f"--{name}" for name in re.findall(r"--([a-z-]+)", _options_of_others())} | OF_FAIRSEQ_ENCODERS
    named = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])")
    unknown = {name_of(page): sorted(set(named.findall(text_of(page))) - known) for page in WRITTEN_BY_HAND}
    assert {page: flags for page, flags in unknown.items() if flags} == {}


def _options_of_others() -> str:
    """Options of pip, of ray start, of fairseq's other commands, and of our own scripts."""
    others = "--decoder-normalize-before --sampling --sampling-topp --max-len-b --beam --score-reference --srcdict "
    others += "--constraint --no-build-isolation --help --version --datastore --check --work --report "
    others += "--page --screenshots --head --port --address --node-ip-address --disable-usage-stats "
    others += "--include-dashboard --resources --model-overrides"
    return others


def test_every_field_of_tuned_values_is_described():
    tuned = pytest.importorskip("fairseq_knnlm.datastore.tuned")
    test_every_field_of_a_file_is_described("`tuned.json`", tuned.TunedValues)


@pytest.mark.parametrize(
    ("section", "record"),
    [
        ("`manifest.json`", Manifest), ("`manifest.json`", Shard), ("`manifest.json`", Projection),
        ("`manifest.json`", Quantizer), ("`index.json`", IndexInfo), ("`run.json`", RunFacts),
        ("`run.json`", MemoryFacts), ("`neighbors.json`", NeighborFacts), ("`head.json`", HeadFacts),
        ("`embeddings.json`", EmbeddingFacts), ("The file of a gate", GateFacts), ("The file of a gate", GateMemory),
    ],
)  # fmt: skip
def test_every_field_of_a_file_is_described(section, record):
    page = text_of(DOCS / "reference/formats.md")
    text = page.split(f"### {section}\n")[1].split("\n#")[0]
    assert [field.name for field in fields(record) if f"`{field.name}`" not in text] == []


def test_no_printed_output_is_missing():
    assert [name_of(page) for page in PAGES if "OUTPUT-TO-COME" in text_of(page)] == []


def test_the_readme_is_short():
    assert len(text_of(REPO / "README.md").splitlines()) <= 135


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example_files(tmp_path_factory) -> Path:
    """A folder with the names that the examples use."""
    folder = tmp_path_factory.mktemp("examples")
    data = make_data(folder / "data-bin/wiki", train=make_lines(120, 0))
    model = make_model(data, folder / "checkpoints/checkpoint_best.pt")
    eval_lm_here(data, model, "--gen-subset", "train", "--knn-dump", folder / "datastore")
    return folder


def test_the_examples_of_the_python_page_run(example_files, monkeypatch):
    monkeypatch.chdir(example_files)
    code = re.findall(r"^```python\n(.*?)^```$", text_of(DOCS / "python.md"), re.MULTILINE | re.DOTALL)
    names: dict = {}
    for block in code:
        exec(compile(ast.parse(block), "docs/python.md", "exec"), names)
    assert names["scores"].tokens[-1] == "</s>" and len(names["scores"].log_probs) == 4
    assert names["text"].startswith("The tournament ")
    assert (names["ids"][:, 0] >= 0).all() and os.path.exists("made-up/manifest.json")
    assert "is not a datastore" in str(names["KnnlmError"]("is not a datastore"))
