"""Probabilities of sentences: the estimate against the exact sum and integral, and the commands."""

import json
import math

import numpy as np
import pytest
import torch
from commands import error_of, knnlm
from editors import LSTM, make_editor_data
from fairseq.data import Dictionary
from test_training import train

from fairseq_knnlm.prototypes.estimates import language_model_log_probs, retrieve, sentence_log_probs
from fairseq_knnlm.tasks.editor_loading import load_editor

TINY = ["--edit-dim", "2", "--edit-kappa", "2"]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """Five prototypes and edit vectors on a circle: everything can be summed. Checkpoint, data, embeddings."""
    folder = tmp_path_factory.mktemp("five")
    data = make_editor_data(folder, train=5, valid=6)
    path = train(data, folder / "model", *LSTM, *TINY, "--max-update", "30", "--batch-size", "5")
    return str(path), *map(str, data)


def exact(loaded, sentences, prototypes) -> np.ndarray:
    """log sum_t p(t) times the mean over the circle of p(x|t, z): every t, 720 z."""
    angles = torch.linspace(0, 2 * math.pi, 721)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    result = []
    for row, length in zip(sentences.tokens, sentences.lengths):
        terms = []
        for number in range(len(prototypes)):
            tokens = prototypes.sentences.rows(np.array([number])).tokens.astype(np.int64)
            read = loaded.model.editor.read(torch.from_numpy(tokens)).repeat(len(circle))
            text = torch.from_numpy(row[:length].astype(np.int64)).expand(len(circle), -1)
            scores = loaded.model.editor.log_likelihood(text, read, circle, loaded.model.eos).double()
            terms.append(torch.logsumexp(scores, 0) - math.log(len(circle)) + prototypes.log_prior[number])
        result.append(float(torch.logsumexp(torch.stack(terms), 0)))
    return np.array(result)


@pytest.fixture(scope="module")
def loaded(five):
    editor = load_editor(*five)
    for part in editor.model.parameters():
        part.requires_grad_(False)
    return editor


def test_the_estimate_approaches_the_exact_sum_from_below(loaded):
    prototypes = loaded.prototypes()
    sentences, embeddings = loaded.split("valid")
    whole = exact(loaded, sentences, prototypes)
    torch.manual_seed(1)

    def estimate(top, samples, rest=0):
        return sentence_log_probs(loaded.model, prototypes, sentences, embeddings, top, samples, rest)

    few = np.stack([estimate(2, 1).log_probs for _ in range(60)])
    # In the mean over draws a truncated, finite estimate lies below the exact value, sentence by sentence.
    assert (few.mean(axis=0) < whole).all()
    every = estimate(None, 2000)
    np.testing.assert_allclose(every.log_probs, whole, atol=0.15)
    assert (estimate(2, 400).log_probs < whole + 0.15).all() and estimate(1, 400).log_probs.sum() < whole.sum()
    assert every.perplexity == pytest.approx(math.exp(-whole.sum() / sentences.lengths.sum()), rel=0.01)
    # What is left out is estimated from some of it, without bias: the mean of p over draws is exact.
    with_rest = [estimate(1, 200, rest=4) for _ in range(8)]
    gap = np.log(np.mean([np.exp(one.log_probs - whole) for one in with_rest], axis=0))
    assert np.abs(gap).max() < 0.3
    assert all((one.top_log_probs < one.log_probs).all() for one in with_rest)
    assert all(one.perplexity < one.top_perplexity for one in with_rest)
    np.testing.assert_allclose(estimate(9, 2000).log_probs, whole, atol=0.15)  # more than there are


def test_pruning_keeps_the_best_and_renormalises(loaded):
    kept = loaded.prototypes(2)
    weights = loaded.model.prior.concentration
    assert kept.numbers.tolist() == weights.argsort(descending=True)[:2].tolist()
    best = weights.sort(descending=True).values[:2]
    np.testing.assert_allclose(kept.log_prior.exp().numpy(), (best / best.sum()).numpy())
    assert kept.nbytes < loaded.prototypes().nbytes
    sentences, embeddings = loaded.split("valid")
    assert torch.allclose(retrieve(loaded.model, kept, embeddings).exp().sum(dim=1), torch.ones(len(sentences)))
    for number, row in zip(kept.numbers, kept.sentences.tokens):
        length = loaded.task.prototypes.lengths[number]
        assert row[:length].tolist() == loaded.task.prototypes.tokens[number, :length].tolist()


def test_copying_is_a_distribution(five, tmp_path):
    """What the editor gives to a sentence word by word is what it gives to the whole."""
    _, data, embeddings = five
    for flags in (["--copy-words"], [], ["--arch", "sparse_editor_transformer", "--copy-words"]):
        path = train((data, embeddings), tmp_path / str(len(flags)), *LSTM, *TINY, *flags, "--max-update", "2")
        model = load_editor(str(path), data, embeddings).model
        with torch.no_grad():
            read = model.editor.read(model.prototype_tokens[:2])
            edits = torch.nn.functional.normalize(torch.randn(2, 2), dim=1)
            sentence = torch.tensor([[5, 9, 6, 2], [7, 7, 2, 1]])
            total = torch.zeros(2)
            for place in range(4):
                previous = torch.cat([torch.full((2, 1), 2), sentence[:, :place]], dim=1)
                scores = model.editor.next_log_probs(previous, read, edits)
                torch.testing.assert_close(scores.exp().sum(dim=1), torch.ones(2), atol=1e-4, rtol=0)
                own = sentence[:, place]
                total += torch.where(own == 1, 0.0, scores.gather(1, own[:, None])[:, 0])
            whole = model.editor.log_likelihood(sentence, read, edits, 2)
        torch.testing.assert_close(whole, total, atol=1e-4, rtol=1e-4)


def test_scores_do_not_depend_on_the_batch(loaded):
    """Padding plays no part in sentences, prototypes and scripts."""
    model = loaded.model
    sentences, _ = loaded.split("valid")
    prototypes, rows = model.prototype_tokens, torch.from_numpy(sentences.tokens[:5].astype(np.int64))
    edits = model.edit_encoder(prototypes, rows)
    together = model.editor.log_likelihood(rows, model.editor.read(prototypes), edits, model.eos)
    for number in range(5):
        row = rows[number : number + 1, : sentences.lengths[number]]
        own = model.trimmed(prototypes[number : number + 1])
        edit = model.edit_encoder(own, row)
        torch.testing.assert_close(edit[0], edits[number], atol=1e-5, rtol=1e-4)
        alone = model.editor.log_likelihood(row, model.editor.read(own), edit, model.eos)
        torch.testing.assert_close(alone[0], together[number], atol=1e-4, rtol=1e-4)


# --- commands -------------------------------------------------------------------------------------------------------


def prototypes_command(capsys, what, five, *flags):
    capsys.readouterr()
    path, data, embeddings = five
    assert knnlm("prototypes", what, "--path", path, "--data", data, "--embeddings", embeddings, *flags, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_evaluate(capsys, five, loaded):
    flags = ["--top", "2", "--samples", "3"]
    found = prototypes_command(capsys, "evaluate", five, *flags, "--prune-num", "all,active,2,1")
    assert [row["prototypes"] for row in found["rows"]] == [5, loaded.model.prior.active(), 2, 1]
    assert found["tokens"] == loaded.split("valid")[0].lengths.sum()
    sizes = [row["bytes"] for row in found["rows"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == loaded.prototypes().nbytes
    assert all(row["sentences_per_second"] > 0 and row["perplexity"] > 1 for row in found["rows"])
    assert prototypes_command(capsys, "evaluate", five, *flags)["rows"][0]["log_prob"] == found["rows"][0]["log_prob"]


def test_a_language_model(capsys, five, tmp_path):
    _, data, embeddings = five
    path = str(train((data, embeddings), tmp_path, *LSTM, "--prototype-prior", "none", "--max-update", "2"))
    found = prototypes_command(capsys, "evaluate", (path, data, embeddings))
    lm = load_editor(path, data, embeddings)
    sentences, _ = lm.split("valid")
    expected = language_model_log_probs(lm.model, sentences).log_probs.sum()
    assert found["rows"][0]["log_prob"] == pytest.approx(expected) and found["active"] is None
    assert len(prototypes_command(capsys, "generate", (path, data, embeddings), "--count", "2")["rows"]) == 2
    place = ["--path", path, "--data", data]
    assert "has no prototypes" in error_of(capsys, "prototypes", "active", *place)
    assert "no prototypes to prune" in error_of(capsys, "prototypes", "evaluate", *place, "--prune-num", "1")


def test_writing(capsys, five, loaded):
    rows = prototypes_command(capsys, "generate", five, "--count", "3", "--edits", "2", "--temperature", "1")["rows"]
    texts = {loaded.task.prototypes.text(number, loaded.task.dictionary) for number in range(5)}
    assert len(rows) == 6 and {row["prototype"] for row in rows} <= texts
    found = prototypes_command(capsys, "interpolate", five, "--first", "1", "--last", "2", "--steps", "4")
    assert len(found["rows"]) == 4 and found["prototype"] in texts
    found = prototypes_command(capsys, "reconstruct", five, "--split", "train", "--sentences", "3")
    assert [row["sentence"] == row["prototype"] for row in found["rows"]] == [False] * 3
    assert found["words"] == sum(len(row["sentence"].split()) for row in found["rows"])


def test_active(capsys, five, loaded, tmp_path):
    found = prototypes_command(capsys, "active", five, "--show", "2", "--mass", "0.5")
    assert found["active"] == loaded.model.prior.active(0.5) and len(found["heaviest"]) == 2
    sentences, _ = loaded.split("valid")
    assert sum(row["words"] for row in found["kept"]) == sentences.lengths.sum() - len(sentences)
    tags = tmp_path / "tags"
    tags.write_text("".join(" ".join(["X"] * (length - 1)) + "\n" for length in sentences.lengths.tolist()))
    (row,) = prototypes_command(capsys, "active", five, "--tags", tags)["kept"]
    kept = sum(row["words"] * row["kept"] for row in found["kept"])
    assert row["class"] == "X" and row["words"] * row["kept"] == pytest.approx(kept)


def test_one_sentence_for_each_mistake(capsys, five, tmp_path):
    path, data, embeddings = five
    place = ["--path", path, "--data", data, "--embeddings", embeddings]
    evaluate = ["prototypes", "evaluate", *place]
    assert "--prune-num must be 1 to 5" in error_of(capsys, *evaluate, "--prune-num", "6")
    assert "--prune-num takes whole numbers" in error_of(capsys, *evaluate, "--prune-num", "few")
    assert "--top takes a number" in error_of(capsys, *evaluate, "--top", "0")
    assert "--samples must be 1 or more" in error_of(capsys, *evaluate, "--samples", "0")
    assert "there is no split" in error_of(capsys, *evaluate, "--split", "nothing")
    interpolate = ["prototypes", "interpolate", *place, "--last", "1"]
    assert "--first must be 1 to 6" in error_of(capsys, *interpolate, "--first", "9")
    other = tmp_path / "other.pt"
    active = ["prototypes", "active", "--path", other, "--data", data]
    assert "there is no checkpoint" in error_of(capsys, *active)
    other.write_text("no checkpoint")
    assert "cannot be loaded as a checkpoint of this data" in error_of(capsys, *active)


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_embed_by_an_lm(corpus, adaptive_model, tmp_path, capsys):
    """The mean of the states after each word, of a sentence that is read alone."""
    from fairseq_knnlm.keys import KeyExtractor
    from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig
    from fairseq_knnlm.tasks.loading import load_model

    command = ["embed", "--data", corpus, "--path", adaptive_model, "--split", "valid", "-o", tmp_path / "valid"]
    assert knnlm(*command) == 0
    array = np.load(tmp_path / "valid/embeddings.npy")
    facts = json.loads((tmp_path / "valid/embeddings.json").read_text())
    assert array.shape == (100, 64) == (facts["sentences"], facts["dim"]) and facts["source"]["layer"] == 1
    _, model = load_model(adaptive_model, KNNLanguageModelingConfig(data=str(corpus)))
    extractor = KeyExtractor(model, "ffn_input_ln", 1)
    dictionary = Dictionary.load(str(corpus / "dict.txt"))
    lines = (corpus.parent / "valid.txt").read_text().splitlines()
    for number in (0, 41, 99):
        words = dictionary.encode_line(lines[number], add_if_not_exist=False).long()[:-1]
        with torch.no_grad():
            states = extractor.run(model, {"src_tokens": torch.cat([torch.tensor([dictionary.eos()]), words])[None]})
        np.testing.assert_allclose(array[number], states[0, 1:].mean(dim=0).numpy(), atol=1e-4)


def test_embeddings_that_are_given(five, tmp_path, capsys):
    _, data, _ = five
    array = tmp_path / "mine.npy"
    np.save(array, np.arange(24.0).reshape(6, 4))
    command = ["embed", "--data", data, "--split", "valid", "--array", array, "-o", tmp_path / "out"]
    assert knnlm(*command) == 0 and knnlm(*command) == 0  # again, over itself
    np.testing.assert_array_equal(np.load(tmp_path / "out/embeddings.npy"), np.arange(24.0).reshape(6, 4))
    np.save(array, np.ones((5, 4)))
    assert "there are 6 sentences" in error_of(capsys, *command)
    np.save(array, np.full((6, 4), np.nan))
    assert "infinite numbers or nan" in error_of(capsys, *command)
    array.write_text("nothing")
    assert "cannot be read as an array" in error_of(capsys, *command)
    assert "is not empty" in error_of(capsys, *command[:-1], data)

