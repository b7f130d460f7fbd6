"""fairseq-train with the neural editor: it trains, checkpoints, resumes; the bound; and what it refuses."""

import numpy as np
import pytest
import torch
from commands import fails_with, run, sentence_of, train_here
from editors import EDITOR, LSTM, make_editor_data, word_embeddings
from fairseq import checkpoint_utils
from tiny import make_data, make_lines

from fairseq_knnlm.prototypes.retriever import retrieval_kl
from fairseq_knnlm.tasks.editor_loading import load_editor


@pytest.fixture(scope="module")
def editor_data(tmp_path_factory):
    return make_editor_data(tmp_path_factory.mktemp("editor"))


def train(editor_data, folder, *flags):
    import fairseq_knnlm.tasks.sparse_prototypes  # noqa: F401  fairseq imports a user folder only if nobody else has

    data, embeddings = editor_data
    return train_here(data, folder, *EDITOR, "--embeddings", embeddings, *flags)


@pytest.fixture(scope="module")
def trained(editor_data, tmp_path_factory):
    return train(editor_data, tmp_path_factory.mktemp("trained"), *LSTM, "--max-update", "8")


def state(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))["model"]


def test_training_resumes_with_lambda_as_it_was(editor_data, trained, tmp_path):
    """Stopped at 3 of 8 updates and resumed: the mass of the prototypes and the network are those of one go."""
    first = state(train(editor_data, tmp_path, *LSTM, "--max-update", "3"))
    assert int(first["prior.steps"]) == 3 and first["prior.concentration"].dtype == torch.float64
    assert first["prior.concentration"].std() > 0
    resumed = state(train(editor_data, tmp_path, *LSTM, "--max-update", "8"))
    assert int(resumed["prior.steps"]) == 8
    whole = state(trained)
    assert set(resumed) == set(whole) and not any("prototype_" in name for name in whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, msg=name)
    # lambda keeps its total: alpha K + N after every step
    assert float(whole["prior.concentration"].sum()) == pytest.approx(0.1 * 60 + 60)
    assert not torch.equal(whole["retriever.weight"], torch.zeros(12, 12))


def test_the_first_step_of_lambda_is_that_of_the_batch(editor_data, tmp_path):
    """rho is 1: alpha + N times the mean of q(t|x), with the W that training began with."""
    data, embeddings = editor_data
    flags = [*LSTM, "--max-update", "1", "--batch-size", "60"]
    path = train(editor_data, tmp_path, *flags)
    loaded = load_editor(str(path), str(data), str(embeddings))
    retriever, vectors = loaded.model.retriever, loaded.model.prototype_embeddings
    with torch.no_grad():
        retriever.weight.zero_()
        retriever.bias.zero_()
        mean = retriever(vectors, vectors, torch.arange(60)).double().exp().mean(dim=0)
    torch.testing.assert_close(loaded.model.prior.concentration, 0.1 + 60 * mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--arch", "sparse_editor_transformer"],
        [*LSTM, "--prototype-prior", "uniform", "--copy-words"],
        [*LSTM, "--prototype-prior", "none"],
        ["--arch", "sparse_editor_transformer", "--prototype-prior", "none", "--copy-words"],
        [*LSTM, "--update-freq", "2", "--prototype-samples", "1"],
    ],
    ids=["transformer", "dense", "lm", "transformer lm", "update freq"],
)
def test_every_kind_trains(editor_data, tmp_path, flags):
    weights = state(train(editor_data, tmp_path, *flags, "--max-update", "2"))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    if "none" in flags:
        assert not any(name.startswith(("prior", "retriever", "edit_encoder")) for name in weights)
    elif "uniform" in flags:
        assert len(weights["prior.concentration"].unique()) == 1 and int(weights["prior.steps"]) == 0
    else:
        assert int(weights["prior.steps"]) == 2  # one for each update, however many batches


def test_the_validation_loss_is_the_bound(editor_data, trained):
    """Reconstruction + KL of z + KL of t + KL of theta / N, each by its own formula."""
    from fairseq_knnlm.criterions.prototype_elbo import PrototypeELBO

    data, embeddings = editor_data
    loaded = load_editor(str(trained), str(data), str(embeddings))
    model, task = loaded.model, loaded.task
    task.load_dataset("valid")
    batch = task.datasets["valid"].collater(list(range(6)))
    criterion = PrototypeELBO(task, 3, 1000, 0.0, False)
    assert [criterion.kl_weight(updates) for updates in (0, 250, 1000, 5000)] == [0, 0.25, 1, 1]
    torch.manual_seed(1)
    with torch.no_grad():
        loss, size, logged = criterion(model, batch)
        torch.manual_seed(1)
        output = model(**batch["net_input"], samples=3)
        kl_t = retrieval_kl(output.log_q, model.prior.log_prior()).sum()
    q, p = torch.distributions.Dirichlet(model.prior.concentration), torch.full((60,), 0.1, dtype=torch.float64)
    kl_theta = torch.distributions.kl_divergence(q, torch.distributions.Dirichlet(p)) / 60
    expected = -output.log_likelihood.mean(dim=1).sum() + kl_t + 6 * (model.edits.kl + kl_theta)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(logged["neg_elbo"]) == pytest.approx(float(loss), rel=1e-5) and size == batch["ntokens"]


def test_a_batch_masks_each_sentence_for_itself(editor_data, trained):
    data, embeddings = editor_data
    loaded = load_editor(str(trained), str(data), str(embeddings))
    loaded.task.load_dataset("train")
    batch = loaded.task.datasets["train"].collater([7, 3, 11])
    with torch.no_grad():
        log_q = loaded.model(**batch["net_input"], samples=2).log_q
    own = torch.tensor([7, 3, 11])
    assert torch.isinf(log_q).nonzero().tolist() == [[0, 7], [1, 3], [2, 11]]
    assert (log_q[:, own] > -torch.inf).sum() == 6


# --- bad input ------------------------------------------------------------------------------------------------------


def test_embeddings_of_another_text(editor_data, tmp_path):
    data, _ = editor_data
    other = make_data(tmp_path / "bin", train=make_lines(60, 9), valid=make_lines(12, 1))
    wrong = (other, word_embeddings(data, tmp_path / "embeddings", "train", "valid"))
    assert "was made for another text (60 sentences, here 60)" in sentence_of(train, wrong, tmp_path / "m", *LSTM)
    assert "run knnlm embed, then give --embeddings" in sentence_of(train, (data, ""), tmp_path / "m", *LSTM)
    missing = sentence_of(train, (data, tmp_path / "nothing"), tmp_path / "m", *LSTM)
    assert "is not a sentence-embeddings" in missing and "knnlm embed" in missing


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("", "line 3 of"), (" ".join(["w1"] * 80), "has 81 tokens, more than --longest-sentence 64")],
)
def test_empty_and_long_sentences(tmp_path, line, sentence):
    data = make_data(tmp_path / "bin", train=[*make_lines(2, 0), line, "w1"], valid=make_lines(2, 1))
    assert sentence in sentence_of(train, (data, tmp_path), tmp_path / "m", *LSTM)


def test_alpha_and_other_settings(editor_data, tmp_path):
    cases = {
        "--prototype-alpha must be above 0, not 0": ["--prototype-alpha", "0"],
        "--edit-kappa must be above 0": ["--edit-kappa", "-1"],
        "--prototype-samples must be 1 or more": ["--prototype-samples", "0"],
        "--hidden-dim must be even": ["--hidden-dim", "7"],
        "--longest-sentence must be 2 or more": ["--longest-sentence", "1"],
    }
    for sentence, flags in cases.items():
        assert sentence in sentence_of(train, editor_data, tmp_path, *LSTM, *flags)


def test_a_user_sees_one_sentence(editor_data, tmp_path):
    """fairseq-train as a process of its own."""
    data, embeddings = editor_data
    flags = [*EDITOR, *LSTM, "--embeddings", embeddings, "--save-dir", tmp_path, "--prototype-alpha", "-0.5"]
    fails_with(run("fairseq-train", data, *flags, check=False), "--prototype-alpha must be above 0, not -0.5")


def test_gradients_reach_every_part(editor_data, trained):
    data, embeddings = editor_data
    loaded = load_editor(str(trained), str(data), str(embeddings))
    from fairseq_knnlm.criterions.prototype_elbo import PrototypeELBO

    loaded.task.load_dataset("train")
    batch = loaded.task.datasets["train"].collater(list(range(8)))
    loaded.model.train()
    loss, _, _ = PrototypeELBO(loaded.task, 2, 0, 0.0, False)(loaded.model, batch)
    loss.backward()
    gradients = {name: part.grad for name, part in loaded.model.named_parameters()}
    zero = [name for name, gradient in gradients.items() if gradient is None or not gradient.abs().sum() > 0]
    assert zero == [] and np.isfinite(float(loss.detach()))
