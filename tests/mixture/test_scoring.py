"""The one function that scores tokens, against the definitions of its parts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import eval_lm_here
from fairseq import checkpoint_utils
from fairseq.data import MonolingualDataset, TokenBlockDataset, data_utils
from reference import cache_probability, knn_probability, load, mixture, similarities
from tiny import make_data, make_lines, make_model

from fairseq_knnlm.data.context_blocks import ContextBlockDataset
from fairseq_knnlm.data.dictionaries import dictionary_facts
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.keys import KeyExtractor
from fairseq_knnlm.memory import ContinuousCache
from fairseq_knnlm.memory.opening import open_datastores
from fairseq_knnlm.mixture import scoring
from fairseq_knnlm.mixture.scoring import read_tokens, score_tokens
from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig

BLOCK, CONTEXT = 32, 32  # of conftest's flags of fairseq-eval-lm
KEYS = [("ffn_input_ln", 1), ("output", 0)]  # of the two datastores, and the first also of the cache
K, TEMPERATURE, SIZE, THETA = 8, 0.5, 40, 0.3
WEIGHTS = [0.3, 0.2, 0.1]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """An untrained model, two datastores of the training text under two keys, and batches of the other text.

    The queries and the text come from dumps, the LM's probabilities from the model's full softmax.
    """
    folder = tmp_path_factory.mktemp("scoring")
    data = make_data(folder / "data", train=make_lines(60, 0), valid=make_lines(20, 1))
    path = make_model(data, folder / "model.pt")
    stores, queries = [], []
    for number, (key, layer) in enumerate(KEYS):
        for split, dtype in (("train", "float16"), ("valid", "float32")):
            flags = ["--knn-key", key, "--knn-layer", layer, "--knn-key-dtype", dtype]
            eval_lm_here(data, path, "--gen-subset", split, "--knn-dump", folder / f"{split}{number}", *flags)
        stores.append(folder / f"train{number}")
        states, tokens = load(Datastore(folder / f"valid{number}"))
        queries.append(states)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data)})
    model.eval()
    config = KNNLanguageModelingConfig(
        data=str(data), knn_datastore=",".join(map(str, stores)), knn_k=str(K), knn_temperature=TEMPERATURE,
        knn_lambda=f"{WEIGHTS[0]},{WEIGHTS[1]}", knn_index="flat",
    )  # fmt: skip
    dictionary = task.target_dictionary
    datastores = open_datastores(config, model, dictionary_facts(dictionary))
    batches = make_batches(data, dictionary)
    lm = []
    with torch.no_grad():
        for batch in batches:
            log_probs = model.get_normalized_probs(model(**batch["net_input"]), log_probs=True)
            for row, target, start in zip(log_probs, batch["target"], batch["start_indices"]):
                own = target[start:][target[start:] != dictionary.pad()]
                lm += row[start : start + len(own)].gather(1, own[:, None])[:, 0].tolist()
    return SimpleNamespace(
        model=model, datastores=datastores, batches=batches, stores=stores, queries=queries, tokens=tokens,
        lm=np.array(lm), dictionary=dictionary,
    )  # fmt: skip


def make_batches(data, dictionary) -> list[dict]:
    """Three blocks each, with their context."""
    lines = data_utils.load_indexed_dataset(str(data / "valid"), dictionary)
    blocks = TokenBlockDataset(
        lines, lines.sizes, BLOCK, pad=dictionary.pad(), eos=dictionary.eos(), break_mode="none", include_targets=True
    )
    dataset = MonolingualDataset(
        blocks, blocks.sizes, dictionary, dictionary, add_eos_for_other_targets=False, shuffle=False, targets=["future"]
    )
    blocks = ContextBlockDataset(dataset, BLOCK, CONTEXT, [(0, len(dataset))])
    groups = [range(start, min(start + 3, len(blocks))) for start in range(0, len(blocks), 3)]
    return [blocks.collater([blocks[number] for number in group]) for group in groups]


def make_cache(model) -> ContinuousCache:
    return ContinuousCache(SIZE, THETA, weight=WEIGHTS[2], extractor=KeyExtractor(model, *KEYS[0]))


@pytest.fixture(scope="module")
def expected(setting):
    """The probabilities of each memory, and the mixture, by the definitions."""
    p = [
        knn_probability(queries, setting.tokens, *load(Datastore(store)), K, TEMPERATURE)
        for queries, store in zip(setting.queries, setting.stores)
    ]
    p.append(cache_probability(setting.queries[0], setting.tokens, SIZE, THETA))
    return SimpleNamespace(memories=p, mixture=mixture(setting.lm, p, WEIGHTS))


def test_two_datastores_and_the_cache(setting, expected):
    scores = score_tokens(setting.model, setting.batches, [*setting.datastores, make_cache(setting.model)])
    assert len(scores) == len(setting.tokens)
    np.testing.assert_array_equal(scores.tokens, setting.tokens)
    np.testing.assert_allclose(scores.lm, setting.lm, atol=1e-5)
    for ours, p in zip(scores.memories, expected.memories, strict=True):
        np.testing.assert_allclose(ours.exp(), p, atol=1e-4)
    np.testing.assert_allclose(scores.mixture, expected.mixture, atol=1e-4)
    assert scores.queries == [] and scores.features is None
    assert scores.entropies[2] is None  # a cache computes none
    for ours, queries, store in zip(scores.entropies, setting.queries, setting.stores):
        nearest = np.sort(similarities(queries, load(Datastore(store))[0]), axis=1)[:, -K:] / TEMPERATURE
        shares = np.exp(nearest - nearest.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(ours, -(shares * np.log(shares + 1e-300)).sum(axis=1), atol=1e-3)


def test_states_are_kept_if_asked_for(setting):
    memories = [*setting.datastores, make_cache(setting.model)]
    scores = score_tokens(setting.model, setting.batches, memories, keep_states=True)
    for ours, queries in zip(scores.queries, [*setting.queries, setting.queries[0]], strict=True):
        np.testing.assert_allclose(ours, queries, atol=1e-5)
    with torch.no_grad():
        softmax = setting.model.decoder.adaptive_softmax
        log_probs = softmax.get_log_prob(scores.features[None], None)[0].gather(1, scores.tokens[:, None])[:, 0]
    np.testing.assert_allclose(log_probs, setting.lm, atol=1e-5)
    rest = scores.from_token(100)
    assert len(rest) == len(scores) - 100 and rest.features.equal(scores.features[100:])
    for part in ("tokens", "lm", "mixture"):
        assert getattr(rest, part).equal(getattr(scores, part)[100:])
    for part in ("memories", "queries"):
        assert all(own.equal(all_[100:]) for own, all_ in zip(getattr(rest, part), getattr(scores, part)))


def test_what_is_read_before_is_remembered(setting, expected):
    """The first two batches are read only: the cache knows them, and the rest is scored as in one run."""
    memories = [*setting.datastores, make_cache(setting.model)]
    read_tokens(setting.model, setting.batches[:2], memories)
    scores = score_tokens(setting.model, setting.batches[2:], memories)
    np.testing.assert_allclose(scores.mixture, expected.mixture[2 * 3 * BLOCK :], atol=1e-4)


@pytest.mark.parametrize("softmax_batch", [1, 7, None])
def test_logits_in_parts(setting, softmax_batch):
    scores = score_tokens(setting.model, setting.batches, [], softmax_batch=softmax_batch)
    np.testing.assert_allclose(scores.mixture, setting.lm, atol=1e-5)


def test_logits_of_all_threads_together_are_limited(corpus, adaptive_model, monkeypatch):
    rows = []
    real = scoring.lm_scores

    def counted(decoder, features, targets, look):
        rows.append(len(targets))
        return real(decoder, features, targets, look)

    monkeypatch.setattr(scoring, "lm_scores", counted)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 208 * 100)  # 100 tokens of this dictionary
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid")
    finally:
        torch.set_num_threads(threads)
    assert max(rows) <= 25 and sum(rows) > 1000
