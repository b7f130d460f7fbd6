"""Generation with the mixture: its tokens and scores against brute force and against fairseq-eval-lm."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import KNN_TASK, eval_lm_here, generate_here, interactive_here, preprocess_here, run, sentence_of
from fairseq import checkpoint_utils
from reference import knn_distribution, load

from fairseq_knnlm.datastore import Datastore

LAMBDA, TEMPERATURE, K = 0.4, 5.0, 32
MIXTURE = ["--knn-lambda", LAMBDA, "--knn-temperature", TEMPERATURE]
INTERACTIVE = ["--buffer-size", "8", "--max-tokens", "2000", "--max-len-b", "20"]


def hypotheses(output: str) -> dict[int, tuple[str, list[float]]]:
    """Of each prompt the text of its best hypothesis and the scores of its tokens."""
    texts = {int(n): text for n, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)}
    scores = {int(n): list(map(float, s.split())) for n, s in re.findall(r"^P-(\d+)\t(.*)$", output, re.MULTILINE)}
    return {number: (texts[number], scores[number]) for number in texts}


@pytest.mark.parametrize("k", ["32", "all"])
@pytest.mark.parametrize("kind", ["adaptive", "plain"])
def test_generated_tokens_have_the_scores_of_eval_lm(k, kind, request, corpus, dump, tmp_path, evaluate):
    model = request.getfixturevalue(f"{kind}_model")
    flags = ["--knn-datastore", dump("train", model=model), "--knn-k", k, *MIXTURE]
    prompts = ["w1 w2 w3", "w7"]
    result = interactive_here(corpus, model, prompts, *INTERACTIVE, *flags, "--beam", "3", "--nbest", "1")
    found = hypotheses(result.stdout)
    assert len(found) == 2
    assert re.search(r"steps of [\d.]+ ms, of which model [\d.]+ ms and search [\d.]+ ms", result.log)
    for number, (text, scores) in found.items():
        assert text.startswith(prompts[number])
        (tmp_path / f"{number}.txt").write_text(text + "\n")
        data = preprocess_here(tmp_path / f"bin{number}", corpus / "dict.txt", test=tmp_path / f"{number}.txt")
        expected = evaluate(data, model, *flags, "--context-window", "0", split="test").scores
        prefix = len(prompts[number].split())
        ours = np.array(scores[prefix : len(expected)]) * np.log(2)  # fairseq-interactive prints base 2
        np.testing.assert_allclose(ours, expected[prefix:], atol=1e-4)


@pytest.fixture
def distribution(corpus, adaptive_model, dump, tmp_path):
    """distribution(text, weight): of each token of a line, its number and p of the whole vocabulary before it."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(adaptive_model)], {"data": str(corpus)})
    model.eval()
    keys, values = load(Datastore(dump("train")))

    def compute(text: str, weight: float) -> tuple[np.ndarray, np.ndarray]:
        folder: Path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "text.txt").write_text(text + "\n")
        data = preprocess_here(folder / "bin", corpus / "dict.txt", test=folder / "text.txt")
        flags = ["--gen-subset", "test", "--context-window", "0", "--knn-key-dtype", "float32"]
        eval_lm_here(data, adaptive_model, *flags, "--knn-dump", folder / "store")
        queries, tokens = load(Datastore(folder / "store"))
        source = torch.cat([torch.tensor([task.source_dictionary.eos()]), torch.from_numpy(tokens.astype(np.int64))])
        with torch.no_grad():
            lm = model.get_normalized_probs(model(source[None, :-1]), log_probs=False)[0].double().numpy()
        knn = knn_distribution(queries, keys, values, K, TEMPERATURE, vocabulary=lm.shape[1])
        return tokens, (1 - weight) * lm + weight * knn

    return compute


@pytest.mark.parametrize("weight", [LAMBDA, 0.0])
@pytest.mark.parametrize("way", ["greedy", "sampling"])
def test_every_token_is_one_that_the_mixture_gives(corpus, adaptive_model, dump, distribution, weight, way):
    """Greedily the most probable one; a sampled one is in the nucleus. Without a datastore the mixture is the LM."""
    knn = ["--knn-datastore", dump("train"), "--knn-k", K, *MIXTURE] if weight else []
    sampling = ["--sampling", "--sampling-topp", "0.9", "--seed", "3"] if way == "sampling" else []
    output = interactive_here(corpus, adaptive_model, ["w1 w2"], *INTERACTIVE, *knn, "--beam", "1", *sampling).stdout
    text, scores = hypotheses(output)[0]
    tokens, p = distribution(text, weight)
    assert text.startswith("w1 w2 ") and len(tokens) == len(scores)
    generated = range(2, len(tokens) - 1)  # after the prompt, without the end of the line, which may have been forced
    own = p[generated, tokens[generated]]
    np.testing.assert_allclose(np.array(scores)[generated] * np.log(2), np.log(own), atol=1e-4)
    p[:, 1] = 0  # padding is never generated
    if way == "greedy":
        np.testing.assert_allclose(own, p[generated].max(axis=1), atol=1e-6)
    else:
        before = np.where(p[generated] > own[:, None] + 1e-6, p[generated], 0).sum(axis=1)
        assert (before < 0.9).all()


def test_fairseq_interactive_as_a_process(corpus, adaptive_model, dump):
    """What it prints is what it prints in this process."""
    flags = [*INTERACTIVE, "--knn-datastore", dump("train"), *MIXTURE, "--beam", "2", "--nbest", "2"]
    command = ["fairseq-interactive", corpus, "--path", adaptive_model, "--cpu", *KNN_TASK]
    process = run(*command, *flags, input="w1 w2\nw7\n").stdout
    here = interactive_here(corpus, adaptive_model, ["w1 w2", "w7"], *flags).stdout
    lines = [re.findall(r"^[HP]-.*", output, re.MULTILINE) for output in (process, here)]
    assert len(lines[0]) == 8 and lines[0] == lines[1]


def test_fairseq_generate(corpus, adaptive_model, dump):
    """Every line is continued after its own words."""
    flags = ["--gen-subset", "test", "--batch-size", "32", "--sample-break-mode", "eos", "--max-len-b", "26"]
    knn = ["--knn-datastore", dump("train"), "--knn-k", K, *MIXTURE]
    output = generate_here(corpus, adaptive_model, *flags, "--beam", "1", *knn).stdout
    sources = {int(n): text for n, text in re.findall(r"^S-(\d+)\t(.*)$", output, re.MULTILINE)}
    found = hypotheses(output)
    # fairseq-generate leaves the last batch out where it is not full, with any task
    assert found.keys() == sources.keys() and len(found) == 96
    assert all(text.startswith(sources[number].removesuffix(" </s>")) for number, (text, _) in found.items())


@pytest.mark.parametrize("as_a_process", [False, True])
def test_score_reference(corpus, adaptive_model, dump, as_a_process):
    """fairseq-generate --score-reference scores with the mixture, as fairseq-eval-lm does; once as a process."""
    flags = [
        "--gen-subset", "test", "--batch-size", "10", "--sample-break-mode", "eos", "--score-reference",
        "--required-batch-size-multiple", "1",
    ]  # fmt: skip
    knn = ["--knn-datastore", dump("train"), *MIXTURE] if as_a_process else []
    if as_a_process:
        command = ["fairseq-generate", corpus, "--path", adaptive_model, "--cpu", *KNN_TASK]
        output = run(*command, *flags, *knn).stdout
    else:
        output = generate_here(corpus, adaptive_model, *flags).stdout
    lines = [line.split("\t")[1].split() for line in output.splitlines() if line.startswith("P-")]
    scores = np.array([float(score) for line in lines for score in line])
    scoring = ["--gen-subset", "test", "--sample-break-mode", "eos", "--context-window", "0", *knn]
    loss = float(eval_lm_here(corpus, adaptive_model, *scoring)["loss"])
    assert -scores.mean() == pytest.approx(loss, abs=2e-4)


def test_bad_input(corpus, adaptive_model, dump):
    knn = ["--knn-datastore", dump("train")]
    long = " ".join(["w1"] * 70)
    assert "shorten it" in sentence_of(interactive_here, corpus, adaptive_model, [long], *INTERACTIVE, *knn)
    cache = [*knn, "--knn-cache-size", "5"]
    assert "without it" in sentence_of(interactive_here, corpus, adaptive_model, ["w1"], *INTERACTIVE, *cache)
    idle = ["--knn-k", "5"]
    assert "does nothing" in sentence_of(interactive_here, corpus, adaptive_model, ["w1"], *INTERACTIVE, *idle)
