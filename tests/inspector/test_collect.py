"""The numbers of the page against NumPy: every entry of the datastore, one by one."""

import numpy as np
import pytest
from pages import compute, needs_node
from stores import keys_of

from fairseq_knnlm.cli.main import _parser
from fairseq_knnlm.cli.texts import load
from fairseq_knnlm.data.text_encoding import DictionaryText
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.inspector.collect import NEIGHBORS, Inspector, temperature_stops
from fairseq_knnlm.inspector.examples import example_texts

TEXT = ["w1 w2 w3 w4", "w9 w5"]
WEIGHT, TEMPERATURE = 0.4, 5.0


@pytest.fixture(scope="module")
def inspector_of(corpus, adaptive_model, dump):
    """inspector_of(k): the page's collector with the datastore of train."""

    def make(k: str) -> Inspector:
        flags = ["--path", adaptive_model, "--data", corpus, "--datastore", dump("train"), "--text", "w1"]
        flags += ["--knn-k", k, "--knn-lambda", WEIGHT, "--knn-temperature", TEMPERATURE]
        return Inspector.of(load(_parser().parse_args(list(map(str, ["inspect", *flags])))), checkpoint="model.pt")

    return make


def reference(inspector: Inspector, k: int | None, temperature: float) -> tuple[np.ndarray, ...]:
    """p LM (n,), p kNN (n,), all shares (n, entries) at a temperature, by brute force."""
    scorer, store = inspector.scorer, inspector.scorer.memories[0].datastore
    scored = scorer.score([scorer.text.encode(line) for line in TEXT])
    queries, tokens = scored.queries[0].numpy().astype(np.float64), scored.tokens.numpy()
    near = -np.square(queries[:, None] - keys_of(store)[None]).sum(axis=2)
    if k is not None:
        near[near < np.sort(near, axis=1)[:, -k][:, None]] = -np.inf
    shares = np.exp((near - near.max(axis=1, keepdims=True)) / temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    knn = (shares * (store.values[None] == tokens[:, None])).sum(axis=1)
    return scored.lm.double().exp().numpy(), knn, shares


@pytest.mark.parametrize("k", ["64", "all"])
def test_numbers(inspector_of, k):
    inspector = inspector_of(k)
    count = None if k == "all" else int(k)
    data = inspector.inspect([inspector.scorer.text.encode(line) for line in TEXT])
    lm, knn, shares = reference(inspector, count, TEMPERATURE)
    mixture = (1 - WEIGHT) * lm + WEIGHT * knn
    column = {name: [token[name] for token in data["tokens"]] for name in ("lm", "knn", "mix")}
    np.testing.assert_allclose(column["lm"], lm, rtol=1e-5)
    np.testing.assert_allclose(column["knn"], knn, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(column["mix"], mixture, rtol=1e-3)
    about = data["about"]
    assert about["mix"] == pytest.approx(np.exp(-np.log(mixture).mean()), rel=1e-4)
    assert about["lm"] == pytest.approx(np.exp(-np.log(lm).mean()), rel=1e-5)
    assert about["source"] == {"checkpoint": "model.pt"}
    (store,) = about["stores"]
    assert store["k"] == (count or "all") and store["lambda"] == WEIGHT and store["temperature"] == TEMPERATURE
    for place, token in enumerate(data["tokens"]):
        # the nearest ones, and how many there are besides
        best = np.argsort(-shares[place], kind="stable")[:NEIGHBORS]
        assert {near["entry"] for near in token["near"]} == set(best.tolist())
        np.testing.assert_allclose([near["share"] for near in token["near"]], shares[place, best], rtol=2e-3)
        assert token["of"] == [count or shares.shape[1]]
    for stop, temperature in enumerate(store["temperatures"]):
        _, other, _ = reference(inspector, count, temperature)
        np.testing.assert_allclose([token["p"][0][stop] for token in data["tokens"]], other, rtol=2e-3, atol=1e-6)


@needs_node
@pytest.mark.parametrize("k", ["64", "all"])
def test_sliders_give_what_the_server_would(inspector_of, k):
    """Lambda and temperature changed in the browser, and asked for anew: the same numbers, and the same neighbours."""
    inspector = inspector_of(k)
    sequences = [inspector.scorer.text.encode(line) for line in TEXT]
    data = inspector.inspect(sequences)
    stop = 3
    memory = inspector.scorer.memories[0]
    memory.weight, memory.temperature = 0.15, data["about"]["stores"][0]["temperatures"][stop]
    asked = inspector.inspect(sequences)
    settings = f"{{lambdas: [0.15], stops: [{stop}]}}"
    computed = compute(f"data.tokens.map((token) => probabilities(token, {settings}, false))", data)
    for name in ("lm", "knn", "mix"):
        expected = [token[name] for token in asked["tokens"]]
        np.testing.assert_allclose([token[name] for token in computed], expected, rtol=2e-4, atol=1e-7)
    mixtures = compute(f"perplexityOf(data.tokens.map((t) => probabilities(t, {settings}, false).mix))", data)
    assert mixtures == pytest.approx(asked["about"]["mix"], rel=1e-4)
    shown = compute(f"data.tokens.map((t) => neighborsOf(t, data.about, {settings}, false, 8))", data)
    for token, found in zip(asked["tokens"], shown):
        assert [near["entry"] for near in found["shown"]] == [near["entry"] for near in token["near"]]
        shares = [near["share"] for near in token["near"]]
        np.testing.assert_allclose([near["share"] for near in found["shown"]], shares, rtol=1e-3, atol=1e-7)
        hits = sum(near["share"] for near in token["near"] if near["w"] == token["w"])
        assert found["rest"] == pytest.approx(1 - sum(shares), abs=1e-3)
        assert hits + found["restOnToken"] == pytest.approx(token["knn"], abs=1e-3)  # all of p kNN is on the page


def test_temperature_stops():
    stops = temperature_stops(12.0)
    assert stops == sorted(stops) and len(stops) == 13 and 12.0 in stops
    assert stops[0] == 1.5 and stops[-1] == 96.0
    ratios = np.divide(stops[1:], stops[:-1])
    np.testing.assert_allclose(ratios, 2**0.5, rtol=1e-3)


def test_examples_are_of_valid(inspector_of, corpus, tmp_path):
    dictionary = inspector_of("64").scorer.dictionary
    texts = example_texts(corpus, dictionary, DictionaryText(dictionary))
    lines = (corpus.parent / "valid.txt").read_text().splitlines()
    assert 1 < len(texts) <= 5 and len(set(texts)) == len(texts)
    for text in texts:
        first, *_ = shown = text.split("\n")
        assert shown == lines[lines.index(first) :][: len(shown)]
        assert 30 <= sum(len(line.split()) + 1 for line in shown) <= 150
    assert example_texts(tmp_path, dictionary, DictionaryText(dictionary)) == []


def test_values_of_the_store_are_the_tokens(inspector_of):
    """The token that a neighbour predicts is the datastore's, by number."""
    inspector = inspector_of("all")
    data = inspector.inspect([inspector.scorer.text.encode(TEXT[0])])
    values, dictionary = Datastore(inspector.scorer.memories[0].datastore.folder).values, inspector.scorer.dictionary
    for token in data["tokens"]:
        for near in token["near"]:
            expected = dictionary[int(values[near["entry"]])]
            assert data["words"][near["w"]] == ("\u23ce" if expected == "</s>" else expected)
