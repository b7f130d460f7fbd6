"""Character models: a byte a token, and bits per character."""

import json
import math
import re
import sys

import pytest
from commands import REPO, eval_lm_here, preprocess_here, run
from fairseq.data import Dictionary
from tiny import make_model

from fairseq_knnlm.cli import main
from fairseq_knnlm.data.characters import is_character_level

TEXT = "Ein Käse_brot,\n\n<b>\ta b</b> und 7|8.\n" * 40


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """The text cut up, and binarised."""
    folder = tmp_path_factory.mktemp("characters")
    (folder / "text").write_text(TEXT, encoding="utf-8")
    held_out = len(TEXT.encode()) // 5 + 3  # inside a line
    script = REPO / "examples/enwik8/characters.py"
    run(sys.executable, script, folder / "text", folder, "--valid", held_out, "--test", held_out)
    return preprocess_here(folder / "bin", **{split: folder / f"{split}.txt" for split in ("train", "valid", "test")})


def test_a_byte_is_a_token(characters):
    text = b""
    for split in ("train", "valid", "test"):
        lines = (characters.parent / f"{split}.txt").read_text().splitlines()
        for line in lines:
            for token in line.split():
                byte = re.fullmatch(r"<0x(..)>", token)
                text += bytes([int(byte[1], 16)]) if byte else {"_": b" "}.get(token, token.encode())
            text += b"\n"
        if split != "test":
            text = text[:-1]  # the part was cut inside a line
    assert text == TEXT.encode()
    assert is_character_level(Dictionary.load(str(characters / "dict.txt")))


def test_words_are_no_characters(corpus):
    assert not is_character_level(Dictionary.load(str(corpus / "dict.txt")))


def test_bits_per_character(characters, caplog, capsys, tmp_path):
    model = make_model(characters, tmp_path / "model.pt", "--criterion", "cross_entropy")
    with caplog.at_level("INFO"):
        loss = float(eval_lm_here(characters, model, "--gen-subset", "valid")["loss"])
    assert float(re.search(r"bits per character: ([\d.]+)", caplog.text)[1]) == pytest.approx(loss, abs=1e-3)
    capsys.readouterr()
    (tmp_path / "line.txt").write_text("a _ b\n")
    assert main(["score", "--path", str(model), "--data", str(characters), "--json", str(tmp_path / "line.txt")]) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])["total"]
    assert total["bits_per_character"] == pytest.approx(math.log2(total["lm"]["perplexity"]), abs=1e-3)
