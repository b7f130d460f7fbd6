"""Generation with the mixture, and its scores against those of fairseq-eval-lm."""

import re
import subprocess

import numpy as np
import pytest
import torch
from conftest import eval_lm_here, fails_with, preprocess, run

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.index import build_index, open_index
from fairseq_knnlm.retrieval import Retriever
from fairseq_knnlm.search import ClusterSearch, ExactSearch

KNN = ["--user-dir", "fairseq_knnlm", "--task", "knn_language_modeling"]
MIXTURE = ["--knn-lambda", "0.4", "--knn-temperature", "5"]


def interactive(data, model, prompts, *flags, check=True) -> subprocess.CompletedProcess:
    return run(
        "fairseq-interactive", data, "--path", model, "--cpu", *KNN, "--buffer-size", "8", "--max-tokens", "2000",
        "--max-len-b", "20", *flags, input="\n".join(prompts) + "\n", check=check,
    )  # fmt: skip


def hypotheses(output: str) -> dict[int, tuple[str, list[float]]]:
    """Of each prompt the text of its best hypothesis and the scores of its tokens."""
    texts = {int(n): text for n, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)}
    scores = {int(n): list(map(float, s.split())) for n, s in re.findall(r"^P-(\d+)\t(.*)$", output, re.MULTILINE)}
    return {number: (texts[number], scores[number]) for number in texts}


@pytest.mark.parametrize("k", ["32", "all"])
@pytest.mark.parametrize("kind", ["adaptive", "plain"])
def test_generated_tokens_have_the_scores_of_eval_lm(k, kind, request, corpus, dump, tmp_path, caplog):
    model = request.getfixturevalue(f"{kind}_model")
    store = dump("train") if kind == "adaptive" else dump("train", model=model)
    flags = ["--knn-datastore", store, "--knn-k", k, *MIXTURE]
    prompts = ["w1 w2 w3", "w7"]
    result = interactive(corpus, model, prompts, *flags, "--beam", "3", "--nbest", "1")
    found = hypotheses(result.stdout)
    assert len(found) == 2
    assert re.search(r"steps of [\d.]+ ms, of which model [\d.]+ ms and search [\d.]+ ms", result.stderr)
    for number, (text, scores) in found.items():
        assert text.startswith(prompts[number])
        (tmp_path / f"{number}.txt").write_text(text + "\n")
        data = preprocess(tmp_path / f"bin{number}", corpus / "dict.txt", test=tmp_path / f"{number}.txt")
        caplog.clear()
        with caplog.at_level("INFO"):
            eval_lm_here(data, model, "--gen-subset", "test", *flags, "--output-word-probs", "--context-window", "0")
        line = next(message for message in caplog.messages if re.match(r"0 \S+ \[", message))
        expected = [float(score) for score in re.findall(r"\[(\S+)\]", line)]
        prefix = len(prompts[number].split())
        ours = np.array(scores[prefix : len(expected)]) * np.log(2)  # fairseq-interactive prints base 2
        np.testing.assert_allclose(ours, expected[prefix:], atol=1e-4)


def test_greedy_and_sampling_and_no_datastore(corpus, adaptive_model, dump):
    knn = ["--knn-datastore", dump("train"), *MIXTURE]
    greedy = interactive(corpus, adaptive_model, ["w1 w2"], *knn, "--beam", "1").stdout
    stock = interactive(corpus, adaptive_model, ["w1 w2"], "--beam", "1").stdout
    assert hypotheses(greedy)[0][1] != hypotheses(stock)[0][1]
    sampled = interactive(
        corpus, adaptive_model, ["w1 w2"], *knn, "--beam", "1", "--sampling", "--sampling-topp", "0.9", "--seed", "3"
    ).stdout
    assert hypotheses(sampled)[0][0].startswith("w1 w2")


def test_fairseq_generate(corpus, adaptive_model, dump):
    result = run(
        "fairseq-generate", corpus, "--path", adaptive_model, "--cpu", *KNN, "--gen-subset", "test",
        "--batch-size", "8", "--sample-break-mode", "eos", "--max-len-b", "40", "--beam", "1",
        "--knn-datastore", dump("train"), *MIXTURE,
    )  # fmt: skip
    sources, found = (set(re.findall(rf"^{kind}-(\d+)", result.stdout, re.MULTILINE)) for kind in "SH")
    # fairseq-generate leaves the last batch out where it is not full, with any task
    assert found == sources and len(found) == 96


def test_bad_input(corpus, adaptive_model, dump):
    knn = ["--knn-datastore", dump("train")]
    long = interactive(corpus, adaptive_model, [" ".join(["w1"] * 70)], *knn, check=False)
    fails_with(long, "shorten it")
    fails_with(interactive(corpus, adaptive_model, ["w1"], *knn, "--knn-cache-size", "5", check=False), "without it")
    fails_with(interactive(corpus, adaptive_model, ["w1"], "--knn-k", "5", check=False), "does nothing")


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_vocabulary_and_target_agree(dump, metric, tmp_path):
    """The full distribution sums to one, and its target column is what scoring computes; for k and for all."""
    datastore = Datastore(dump("train"))
    index = open_index(datastore, build_index(datastore, "IVF32,SQfp16", metric, f"test-{metric}"))
    queries = torch.from_numpy(datastore.gather_keys(np.arange(5, 400, 9)).astype(np.float32)) + 0.1
    targets = torch.from_numpy(datastore.values[5:400:9].astype(np.int64))
    for engine in (ExactSearch(datastore, metric), ClusterSearch(index, datastore, metric, 8)):
        for k in (16, None):
            retriever = Retriever(datastore, engine, k, 0.25, 5.0, metric)
            everything = retriever.vocabulary_log_probs(queries, 208)
            np.testing.assert_allclose(everything.exp().sum(dim=1), 1, atol=1e-4)
            expected = retriever.target_log_probs(queries, targets)
            ours = everything[torch.arange(len(targets)), targets]
            np.testing.assert_allclose(ours.exp(), expected.exp(), atol=1e-4)
