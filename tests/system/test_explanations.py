"""The recipes for what else could explain a kNN-LM, at toy size: every command runs in this process."""

import contextlib
import io
import json
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from commands import REPO, knnlm, parse
from fairseq import options
from fairseq.logging import metrics
from reference import mixture

from fairseq_knnlm.saved_runs.scores import SavedScores

PAPERS = REPO / "examples/papers"
CONTEXT = ["--tokens-per-sample", "96", "--context-window", "48", "--parts", "2"]
TOY = [*CONTEXT, "--size", "toy", "--updates", "12", "--tokens", "6000"]


def run_here(*command) -> dict:
    """A command of a recipe; what it printed."""
    from fairseq_cli import eval_lm, train

    name, *words = (str(word) for word in command)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if name == "fairseq-train":
            metrics.reset()
            train.main(parse(options.get_training_parser, *words, "--cpu", "--num-workers", "0"))
        elif name == "fairseq-eval-lm":
            eval_lm.main(parse(options.get_eval_lm_parser, *words, "--cpu", "--num-workers", "0"))
        elif name == "knnlm":
            assert knnlm(*words) == 0
        else:
            run_script(*words)
    return {"stdout": output.getvalue(), "output": output.getvalue()}


def run_script(path, *arguments) -> None:
    """A Python script as the main program."""
    before = sys.argv
    sys.argv = [str(path), *map(str, arguments)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    """recipe(name, ...): what a recipe wrote: its results, its page, and its folder."""
    monkeypatch.syspath_prepend(str(PAPERS))
    for module in ("common", "small_lms", "where"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    import common

    monkeypatch.setattr(common, "run", run_here)

    def run(name, *arguments, work=tmp_path):
        run_script(PAPERS / f"{name}.py", *arguments)
        content = json.loads((work / f"results/{name}.json").read_text())
        page = (work / f"results/{name}.md").read_text()
        (work / f"results/{name}.md").unlink()
        run_script(PAPERS / f"{name}.py", "--report", "--out", work / "results")
        assert (work / f"results/{name}.md").read_text() == page  # from the JSON alone
        assert all(str(tmp_path) not in command for command in content["commands"])
        return SimpleNamespace(result=content["results"], page=page, commands=content["commands"])

    return run


def folder_of(work):
    return work / "part-6000-toy-12"


def test_ensembles(recipe, corpus, tmp_path):
    made = recipe("ensembles", corpus, tmp_path, "--lms", "2", *TOY)
    one, two = made.result["rows"]
    saves = [SavedScores.open([folder_of(tmp_path) / f"lm-{seed}-1"]) for seed in (1, 2)]
    assert one["mean"] == pytest.approx(np.exp(-saves[0].lm.mean()), rel=1e-5)
    mean = mixture(saves[0].lm, [np.exp(saves[1].lm)], [0.5])
    assert two["mean"] == pytest.approx(np.exp(-mean.mean()), rel=1e-4)  # --path a.pt:b.pt
    assert two["weighted"] < max(one["mean"], two["mean"]) * 1.01 and sum(two["weights"]) == pytest.approx(1)
    assert one["knn"] < one["mean"] and two["knn"] < two["mean"]
    assert f"{two['knn']:.2f}" in made.page and "12 updates each, on 6,000 tokens" in made.page
    assert (tmp_path / "results/ensembles.svg").exists()


def test_overfitting(recipe, corpus, tmp_path):
    made = recipe("overfitting", corpus, tmp_path, "--longer", "40", *TOY)
    lm, by_heart = made.result["train"].values()
    assert by_heart < 0.8 * lm  # 40 more updates on 6,000 tokens
    assert made.result["mixed"]["mixture"] <= min(made.result["valid"].values()) * 1.02
    assert made.result["knn"]["mixture"] < made.result["valid"]["LM"]
    assert f"{made.result['mixed']['mixture']:.2f}" in made.page


def test_soft_labels(recipe, corpus, tmp_path):
    made = recipe("soft_labels", corpus, tmp_path, *TOY)
    rows = made.result["rows"]
    assert rows[0]["label"] == "the token" and len(rows) == 4
    assert len({round(row["perplexity"], 6) for row in rows}) == 4  # each learnt something else
    assert all(1 < row["perplexity"] < 208 for row in rows)
    trained = [command for command in made.commands if "--soft-weight" in command]
    assert len(trained) == 3 and all("--criterion soft_labels" in command for command in trained)


def test_sparsified(recipe, corpus, adaptive_model, dump, tmp_path):
    made = recipe(
        "sparsified", corpus, adaptive_model, tmp_path, "--ks", "1,8,208", "--datastore", dump("train"), *CONTEXT
    )
    rows = made.result["rows"]
    assert [row["among"] for row in rows] == sorted(row["among"] for row in rows) and rows[-1]["among"] == 1
    assert rows[-1]["perplexity"] == pytest.approx(made.result["lm"], rel=1e-3)  # with all tokens it is the LM
    assert made.result["knn"]["mixture"] < made.result["lm"]
    saved = SavedScores.open([tmp_path / "sparsified-1"])
    part = saved.parts[0]
    eight = rows[1]
    top = part.arrays["top.tokens"][:, :8] == part.arrays["tokens"][:, None]
    p = np.where(top.any(axis=1), np.exp(saved.lm) / part.arrays["top.probs"][:, :8].astype(float).sum(axis=1), 0)
    expected = mixture(saved.lm, [p], [eight["lambda"]])
    assert eight["perplexity"] == pytest.approx(np.exp(-expected.mean()), rel=1e-6)


def test_places(recipe, corpus, adaptive_model, dump, tmp_path):
    scored = ["--knn-datastore", dump("train"), "--knn-k", "64", "--knn-save", tmp_path / "save"]
    window = ["--tokens-per-sample", "96", "--context-window", "48"]
    run_here("fairseq-eval-lm", corpus, "--path", adaptive_model, "--gen-subset", "valid", *window,
             "--user-dir", REPO / "fairseq_knnlm", "--task", "knn_language_modeling", *scored)  # fmt: skip
    places = ["--save", tmp_path / "save", "--boundary", "re:w1.*"]
    made = recipe("places", corpus, adaptive_model, tmp_path, *places)
    blocks, documents = made.result["place in the block"], made.result["place in the document"]
    assert [row["from"] for row in blocks] == list(range(0, 48, 6))
    for rows in (blocks, documents):
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert sum(row["share"] * row["gain"] for row in rows) == pytest.approx(made.result["gain"], abs=1e-6)
    saved = SavedScores.open([tmp_path / "save"])
    first = saved.lm[np.arange(len(saved)) % 48 < 6]
    assert blocks[0]["loss"] == pytest.approx(-first.mean())


def test_pruning(recipe, corpus, adaptive_model, dump, tmp_path):
    names = ("random", "merge", "average-steps", "learned")
    methods = ["--methods", ",".join(names), "--fractions", "0.1,0.5", "--datastore", dump("train")]
    made = recipe("pruning", corpus, adaptive_model, tmp_path, *methods, *CONTEXT)
    whole, rows = made.result["whole"], made.result["pruned"]
    assert [(row["method"], row["keep"]) for row in rows] == [(name, keep) for name in names for keep in (0.5, 0.1)]
    assert all(abs(row["entries"] - row["keep"] * whole["entries"]) <= 1 for row in rows)
    assert len({round(row["mixture"], 6) for row in rows}) == 8
    (more,) = made.result["more_lists"]  # only where the share is large
    assert (more["nprobe"], more["keep"], more["entries"]) == (64, 0.5, whole["entries"])
    assert all(row["tokens"] == whole["tokens"] for row in rows)
    assert all(row["mixture"] < 1.01 * whole["lm"] for row in rows) and whole["mixture"] < whole["lm"]
    assert not list(tmp_path.glob("pruned-*"))  # what is scored is removed


def test_far_field(recipe, corpus, adaptive_model, dump, tmp_path):
    store = dump("train")
    stores = ["--datastore", store, "--other", corpus, "--other-datastore", store, "--index", "IVF32,SQfp16"]
    lists = ["--lists", "2,32", "--far", "0,8"]
    rows = recipe("far_field", corpus, adaptive_model, tmp_path, *stores, *lists, *CONTEXT).result
    own, other = rows[:4], rows[4:]
    assert [(row["nprobe"], row["far"]) for row in own] == [(2, 0), (2, 8), (32, 0), (32, 8)]
    assert [row["mixture"] for row in own] == [row["mixture"] for row in other]  # it is the same text
    few, far, whole, again = (row["mixture"] for row in own)
    assert few != far and whole == again  # where all lists are visited, none is left


def test_compact(recipe, corpus, adaptive_model, dump, tmp_path):
    forms = ["--datastore", dump("train"), "--forms", "16xint8,8xfloat16"]
    whole, small, tiny = recipe("compact", corpus, adaptive_model, tmp_path, *forms, *CONTEXT).result
    assert (small["dim"], small["dtype"], tiny["dim"], tiny["dtype"]) == (16, "int8", 8, "float16")
    assert 0 < tiny["variance_kept"] < small["variance_kept"] < 1 and whole["variance_kept"] is None
    assert small["store_bytes"] == pytest.approx(18, rel=0.2) and whole["store_bytes"] > 100
    assert len({row["mixture"] for row in (whole, small, tiny)}) == 3
    assert not [path for path in tmp_path.glob("compact-*") if (path / "manifest.json").exists()]
