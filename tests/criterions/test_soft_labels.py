"""The criterion soft_labels: its loss and gradients against fairseq's own, its labels against the text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import KNN_TASK, TRAINING, eval_lm_here, sentence_of, train_here
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from reference import knn_distribution, load
from tiny import ADAPTIVE

from fairseq_knnlm.criterions.label_sources import LabelledBlocks, LabelRows, NeighborLabels, SavedLabels, open_labels
from fairseq_knnlm.criterions.soft_labels import SoftLabelsCriterion
from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.mixture.output_layer import all_log_probs
from fairseq_knnlm.saved_runs.format import SavePart
from fairseq_knnlm.tasks.config import KNNLanguageModelingConfig
from fairseq_knnlm.tasks.loading import load_model

K = 5
READING = {"dataset_impl": "mmap", "use_plasma_view": False, "seed": 1}  # what a command fills in


@pytest.fixture(params=["plain_model", "adaptive_model"])
def setting(request, corpus):
    """A model in training without dropout, and a batch in which one row is padded."""
    config = KNNLanguageModelingConfig(data=str(corpus), tokens_per_sample=64, **READING)
    task, model = load_model(request.getfixturevalue(request.param), config)
    model.train()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    batch = dataset.collater([dataset[number] for number in (3, 1, len(dataset) - 1)])
    assert (batch["target"] == task.dictionary.pad()).any()
    return SimpleNamespace(task=task, model=model, batch=batch, adaptive=model.decoder.adaptive_softmax is not None)


def loss_and_gradients(setting, criterion, labels=None) -> tuple[float, torch.Tensor]:
    setting.model.zero_grad()
    sample = setting.batch if labels is None else {**setting.batch, "soft_labels": labels._asdict()}
    loss, size, logged = criterion(setting.model, sample)
    assert size == logged["ntokens"] == int((setting.batch["target"] != setting.task.dictionary.pad()).sum())
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in setting.model.parameters() if p.grad is not None])


def targets_of(setting) -> torch.Tensor:
    return setting.batch["target"][setting.batch["target"] != setting.task.dictionary.pad()]


def cross_entropy(setting) -> tuple[float, torch.Tensor]:
    """With the tokens: fairseq's own; for an adaptive softmax, whose own loss leaves a token out, of all of it."""
    if not setting.adaptive:
        setting.model.zero_grad()
        loss, _, _ = CrossEntropyCriterion(setting.task, False)(setting.model, setting.batch)
    else:
        setting.model.zero_grad()
        features, _ = setting.model(**setting.batch["net_input"], features_only=True)
        own = features[setting.batch["target"] != setting.task.dictionary.pad()]
        softmax = setting.model.decoder.adaptive_softmax
        head = softmax.head(own).log_softmax(dim=1)  # fairseq's own function for all tokens has no gradient
        words = softmax.cutoff[0]
        tails = [tail(own).log_softmax(dim=1) + head[:, [words + number]] for number, tail in enumerate(softmax.tail)]
        loss = -torch.cat([head[:, :words], *tails], dim=1).gather(1, targets_of(setting)[:, None]).sum()
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in setting.model.parameters() if p.grad is not None])


def same(ours, theirs) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    np.testing.assert_allclose(ours[1], theirs[1], atol=2e-4)


def random_labels(setting, k=K) -> LabelRows:
    count = len(targets_of(setting))
    probs = torch.rand(count, k + 1).softmax(dim=1)
    return LabelRows(torch.randint(4, 208, (count, k)), probs[:, :k], probs[:, k])


def test_without_weight_it_is_cross_entropy(setting):
    criterion = SoftLabelsCriterion(setting.task, 0.0, K, False)
    same(loss_and_gradients(setting, criterion, random_labels(setting)), cross_entropy(setting))


@pytest.mark.parametrize("lm_columns", [0, 1])
def test_labels_that_are_the_tokens_are_cross_entropy(setting, lm_columns):
    targets = targets_of(setting)[:, None]
    labels = LabelRows(targets, torch.ones(len(targets), 1), torch.zeros(len(targets)))
    criterion = SoftLabelsCriterion(setting.task, 0.7, lm_columns, False)
    same(loss_and_gradients(setting, criterion, labels), cross_entropy(setting))


def test_uniform_labels_are_label_smoothing(setting):
    if setting.adaptive:
        pytest.skip("fairseq smooths labels of a plain softmax only")
    count, types, weight = len(targets_of(setting)), len(setting.task.dictionary), 0.3
    labels = LabelRows(
        torch.arange(types).expand(count, types), torch.full((count, types), 1 / types), torch.zeros(count)
    )
    ours = loss_and_gradients(setting, SoftLabelsCriterion(setting.task, weight, 0, False), labels)
    smoothed = LabelSmoothedCrossEntropyCriterion(setting.task, False, weight * (types - 1) / types)
    setting.model.zero_grad()
    loss, _, _ = smoothed(setting.model, setting.batch)
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in setting.model.parameters() if p.grad is not None])
    same(ours, (float(loss.detach()), gradients))


def test_two_kinds_of_labels_by_hand(setting):
    """Some tokens of an LM with a rest, and neighbours, one of which the LM has listed."""
    labels = random_labels(setting, k=4)
    labels.tokens[:, :2] = torch.tensor([7, 150])
    labels.tokens[:, 3] = 7
    criterion = SoftLabelsCriterion(setting.task, 0.4, 2, False)
    ours, _ = loss_and_gradients(setting, criterion, labels)
    with torch.no_grad():
        features, _ = setting.model(**setting.batch["net_input"], features_only=True)
        p = all_log_probs(setting.model.decoder, features[setting.batch["target"] != 1]).exp().double().numpy()
    rows, listed = np.arange(len(p))[:, None], labels.probs.numpy()
    soft = -(listed * np.log(p[rows, labels.tokens.numpy()])).sum(axis=1)
    soft -= labels.rest.numpy() * np.log(1 - p[:, [7, 150]].sum(axis=1))
    hard = -np.log(p[rows[:, 0], targets_of(setting).numpy()])
    assert ours == pytest.approx((0.6 * hard + 0.4 * soft).sum(), rel=1e-5)


def test_a_model_that_gives_the_labels_has_nothing_to_learn():
    """The gradient vanishes where the listed tokens and the rest have the labels' probabilities."""
    logits = torch.randn(6, 30, requires_grad=True)
    log_probs = logits.log_softmax(dim=1)
    tokens = log_probs.topk(K, dim=1).indices
    listed = log_probs.gather(1, tokens)
    probs = listed.detach().exp()
    criterion = SoftLabelsCriterion(SimpleNamespace(target_dictionary=None), 1.0, K, False)
    criterion.cross_entropy(listed, probs, 1 - probs.sum(dim=1)).sum().backward()
    np.testing.assert_allclose(logits.grad, 0, atol=1e-5)


def test_validation_is_with_the_tokens(setting):
    setting.model.eval()
    criterion = SoftLabelsCriterion(setting.task, 0.9, K, False)
    loss, _, logged = criterion(setting.model, setting.batch)
    assert float(loss.detach()) == pytest.approx(cross_entropy(setting)[0], rel=1e-5)
    assert float(logged["nll_loss"]) == float(loss.detach())


# --- labels of a text -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def save(corpus, adaptive_model, tmp_path_factory):
    """In two parts."""
    folder = tmp_path_factory.mktemp("labels")
    for number in (0, 1):
        shards = ["--gen-subset", "train", "--num-shards", 2, "--shard-id", number]
        eval_lm_here(corpus, adaptive_model, *shards, "--knn-save", folder / f"{number}", "--knn-save-top", K)
    return f"{folder / '1'},{folder / '0'}"


def blocks_of(corpus, model, labels, split="train", **changes):
    config = KNNLanguageModelingConfig(data=str(corpus), tokens_per_sample=50, **READING, **changes)
    task, _ = load_model(model, config)
    task.soft_labels = labels
    task.load_dataset(split)
    return task.dataset(split)


def test_every_block_brings_its_own_rows(corpus, adaptive_model, save):
    """Whatever the blocks of training are, and in whichever order they come."""
    blocks = blocks_of(corpus, adaptive_model, open_labels(save, None, None, None))
    assert isinstance(blocks, LabelledBlocks)
    parts = [SavePart.open(folder) for folder in reversed(save.split(","))]
    names = ("tokens", "top.tokens", "top.probs")
    tokens, top, probs = (np.concatenate([part.arrays[name] for part in parts]) for name in names)
    order = blocks.ordered_indices()[:7]
    batch = blocks.collater([blocks[int(number)] for number in order])
    rows = np.concatenate([np.arange(50 * number, min(50 * number + 50, len(tokens))) for number in order])
    np.testing.assert_array_equal(batch["target"][batch["target"] != 1], tokens[rows])
    labels = batch["soft_labels"]
    np.testing.assert_array_equal(labels["tokens"], top[rows])
    np.testing.assert_array_equal(labels["probs"], probs[rows])
    np.testing.assert_allclose(labels["rest"], 1 - probs[rows].astype(np.float32).sum(axis=1), atol=1e-3)


def test_neighbours_are_p_knn(corpus, adaptive_model, neighbors, dump, save):
    """And the mixture of both sums up to 1."""
    labels = NeighborLabels(str(neighbors / "train"), 30.0)
    rows = labels.rows(500, 520)
    keys, values = load(Datastore(dump("train")))
    table, expected = labels.table, np.zeros((20, 208))
    for row in range(20):
        near = keys[table.ids(500, 520)[row]]
        own = keys[500 + row : 501 + row]
        expected[row] = knn_distribution(own, near, values[table.ids(500, 520)[row]], 4, 30.0, vocabulary=208)[0]
    ours = np.zeros((20, 208))
    np.add.at(ours, (np.arange(20)[:, None], rows.tokens.numpy()), rows.probs.numpy())
    np.testing.assert_allclose(ours, expected, atol=1e-3)
    both = open_labels(save, str(neighbors / "train"), 0.4, 30.0).rows(500, 520)
    np.testing.assert_allclose(both.probs[:, K:], 0.4 * rows.probs, rtol=1e-5)
    np.testing.assert_allclose(both.probs.sum(dim=1) + both.rest, 1, atol=1e-3)


@pytest.mark.parametrize("flags", [[], ADAPTIVE])
def test_training(corpus, save, neighbors, tmp_path, flags, caplog):
    """fairseq-train learns from both kinds of labels, and the checkpoint is an ordinary one."""
    flags = [flag for flag in flags if flag not in ("--criterion", "adaptive_loss")]
    soft = ["--criterion", "soft_labels", "--soft-labels", save, "--soft-neighbors", neighbors / "train"]
    training = [*TRAINING, *flags, "--decoder-normalize-before", "--max-update", "25", *KNN_TASK, *soft]
    checkpoint = train_here(corpus, tmp_path, *training, "--soft-temperature", "30", "--tokens-per-sample", "48")
    loss = float(eval_lm_here(corpus, checkpoint, "--gen-subset", "valid", stock=True)["loss"])
    assert loss < 7.2  # bits; log2 of 208 types is 7.7


def test_refused(corpus, adaptive_model, plain_model, save, neighbors, dump, tmp_path):
    for given, part in [
        ((None, None, None, None), "needs labels"),
        ((save, None, 0.5, None), "give both"),
        ((save, None, None, 2.0), "is for --soft-neighbors"),
        ((save, str(neighbors / "train"), 1.5, None), "between 0 and 1"),
        ((None, str(neighbors / "train"), None, 0.0), "must be above 0"),
        ((None, str(neighbors / "train"), None, None), "give --soft-temperature"),  # 4 neighbours are few
        ((save, str(neighbors / "valid"), None, 3.0), "of different splits (train, valid)"),
        ((save.split(",")[0], None, None, None), "give every part of it"),
        ((str(tmp_path), None, None, None), "is not a save"),
    ]:
        assert part in sentence_of(open_labels, *given)
    eval_lm_here(corpus, adaptive_model, "--gen-subset", "valid", "--knn-save", tmp_path / "bare")
    assert "holds no most probable tokens" in sentence_of(SavedLabels, [str(tmp_path / "bare")])
    labels = open_labels(save, None, None, None)
    labels.split = "valid"
    assert "is of another text" in sentence_of(blocks_of, corpus, adaptive_model, labels, "valid")
    labels.split = "train"
    assert "leave out --add-bos-token" in sentence_of(blocks_of, corpus, adaptive_model, labels, add_bos_token=True)
    text = np.concatenate([part.arrays["tokens"] for part in labels.sources[0][0].parts])
    text[77] += 1
    assert "row 77 belongs to another token" in sentence_of(labels.sources[0][0].check_text, text)
    train = [train_here, corpus, tmp_path / "lm", *TRAINING, "--decoder-normalize-before", "--max-update", "1"]
    soft = ["--criterion", "soft_labels", "--soft-labels", save]
    assert "needs --task knn_language_modeling" in sentence_of(*train, *soft)
    assert "--soft-weight must be between" in sentence_of(*train, *KNN_TASK, *soft, "--soft-weight", "2")
    assert "not what is trained on" in sentence_of(*train, *KNN_TASK, *soft, "--train-subset", "valid")
    adaptive = [flag for flag in ADAPTIVE if flag not in ("--criterion", "adaptive_loss", "legacy_ddp")]
    error = sentence_of(*train, *KNN_TASK, *adaptive, "pytorch_ddp", *soft)
    assert "use legacy_ddp" in error
