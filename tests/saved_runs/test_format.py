"""A save on disk: its size, killed half-way, in somebody's folder."""

import pytest
import torch
from saves import random_save

from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.saved_runs.format import RunFacts, SaveWriter, bytes_per_token
from fairseq_knnlm.saved_runs.scores import SavedScores


def test_bytes_per_token(tmp_path):
    made = random_save(tmp_path / "save", count=1000)
    evidence = SavedScores.open([made.folder])
    on_disk = sum(path.stat().st_size for path in made.folder.glob("*.npy"))
    assert on_disk == pytest.approx(1000 * bytes_per_token(evidence.run), rel=0.05)


def test_a_killed_save_is_no_save(tmp_path):
    writer = SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 10, 10, []))
    writer.add(torch.zeros(5), torch.zeros(5))
    assert not (tmp_path / "save").exists()
    with pytest.raises(KnnlmError, match=r"another process .* is writing the save"):
        SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 5, 5, []))
    del writer
    again = SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 5, 5, []))
    again.add(torch.zeros(5), torch.zeros(5))
    again.finish(1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_somebody_elses_folder_stays(tmp_path):
    from fairseq_knnlm.saved_runs.format import RunFacts

    (tmp_path / "save.partial").mkdir()
    (tmp_path / "save.partial/thesis.tex").write_text("precious")
    with pytest.raises(KnnlmError, match=r"thesis.tex is in the way"):
        SaveWriter(tmp_path / "save", RunFacts({"split": "valid"}, 0, 5, 5, []))
    assert (tmp_path / "save.partial/thesis.tex").read_text() == "precious"
