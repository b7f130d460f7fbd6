"""Records with a checksum."""

from fairseq_knnlm.storage import write_record
from fairseq_knnlm.storage.records import is_intact, read_record


def test_records_notice_an_edit(tmp_path, caplog):
    write_record(tmp_path / "x.json", {"layer": 5, "perplexity": float("inf")})
    assert is_intact(tmp_path / "x.json") and read_record(tmp_path / "x.json") == {"layer": 5, "perplexity": "inf"}
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "x.json").write_text(text.replace("5", "4", 1))
    assert not is_intact(tmp_path / "x.json")
    read_record(tmp_path / "x.json")
    assert "checksum differs" in caplog.text
