"""Scores from a save against brute force on what went into it."""

import numpy as np
import pytest
from saves import brute_force, random_save

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.saved_runs.scores import SavedScores
from fairseq_knnlm.saved_runs.settings import Settings, evaluate


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-3])
def test_scores_from_a_save(tmp_path, scale):
    """Half precision is enough whatever the distances' magnitude."""
    made = random_save(tmp_path / "save", scale=scale)
    evidence = SavedScores.open([made.folder])
    for k in (1, 5, 16):
        for sharpness in (0.1, 1.0, 4.0):
            expected = brute_force(*made.knn0, k, sharpness)
            ours = evidence.scores("knn0", k, sharpness / scale)
            np.testing.assert_allclose(np.exp(ours.log_probs), expected, atol=5e-4)
            np.testing.assert_array_equal(ours.hits, made.knn0[1][:, :k].any(axis=1))
    several = evidence.log_probs_for_all_k("knn0", [1, 5, 16], 1.0 / scale)
    for row, k in zip(several, (1, 5, 16)):
        np.testing.assert_allclose(np.exp(row), brute_force(*made.knn0, k, 1.0), atol=5e-4)


def test_result_line(tmp_path):
    made = random_save(tmp_path / "save")
    evidence = SavedScores.open([made.folder])
    result = evaluate(evidence, Settings((0.3, 0.2), 8, (2.0,), 24, 0.25))
    knn, cache = brute_force(*made.knn0, 8, 0.5), brute_force(*made.cache, 24, 0.25)
    lm = np.exp(made.lm)
    assert result.lm == pytest.approx(np.exp(-made.lm.mean()), rel=1e-5)
    assert result.mixture == pytest.approx(np.exp(-np.log(0.5 * lm + 0.3 * knn + 0.2 * cache).mean()), rel=1e-4)
    assert result.oracle == pytest.approx(np.exp(-np.log(np.max([lm, knn, cache], axis=0)).mean()), rel=1e-3)
    assert result.hit_rate == pytest.approx(made.knn0[1][:, :8].any(axis=1).mean())
    near = made.knn0[0][:, :8]
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.nan_to_num(np.exp(0.5 * (near - near.max(axis=1, keepdims=True))))
        weights /= weights.sum(axis=1, keepdims=True)
        entropy = -np.nan_to_num(weights * np.log(weights)).sum(axis=1)
    assert result.effective_neighbors == pytest.approx(np.exp(entropy.mean()), rel=1e-3)


def test_parts_are_one_run(tmp_path):
    first = random_save(tmp_path / "a", start=0, seed=1)
    second = random_save(tmp_path / "b", start=400, seed=2)
    both = SavedScores.open([second.folder, first.folder])
    np.testing.assert_array_equal(both.lm, np.concatenate([first.lm, second.lm]))
    with pytest.raises(KnnlmError, match="same tokens"):
        SavedScores.open([first.folder, first.folder])
