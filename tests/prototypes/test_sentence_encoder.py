"""Embeddings by a sentence encoder in a folder: those that transformers itself gives, sentence by sentence."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import error_of, knnlm
from fairseq.data import Dictionary
from tiny import make_lines

from fairseq_knnlm.data.hf_tokenizer import import_transformers
from fairseq_knnlm.data.sentences import load_sentences
from fairseq_knnlm.errors import KnnlmError
from fairseq_knnlm.models.hf_loading import HFFolder
from fairseq_knnlm.models.hf_sentence_encoder import encode_sentences

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A tiny random BERT with words as its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    transformers = import_transformers()
    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word for line in make_lines(60, 0) for word in line.split()})
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "-", *words[: len(words) - 3]]  # some are unknown to it
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(str(folder))
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=40, pad_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(str(folder))
    return folder


def alone(encoder: Path, text: str, first: bool) -> np.ndarray:
    transformers = import_transformers()
    model = transformers.AutoModel.from_pretrained(str(encoder)).eval()
    with torch.no_grad():
        batch = transformers.AutoTokenizer.from_pretrained(str(encoder))(text, return_tensors="pt")
        states = model(**batch).last_hidden_state[0]
    return (states[0] if first else states.mean(dim=0)).numpy()


def choose_pooling(folder: Path, **modes: bool) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    content = {"word_embedding_dimension": 16, **{f"pooling_mode_{name}": value for name, value in modes.items()}}
    (folder / "1_Pooling/config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("first", [False, True])
def test_embeddings_are_those_of_each_sentence_alone(encoder, first):
    choose_pooling(encoder, mean_tokens=not first, cls_token=first)
    sentences = [line.split() for line in make_lines(20, 3)] + [["<unk>", "@-@"]]
    found = encode_sentences(HFFolder(encoder), sentences)
    assert found.shape == (21, 16) and found.dtype == np.float32
    for words, row in zip(sentences, found):
        text = " ".join({"<unk>": "[UNK]", "@-@": "-"}.get(word, word) for word in words)
        np.testing.assert_allclose(row, alone(encoder, text, first), atol=1e-5)


def test_embed_by_an_encoder(encoder, corpus, tmp_path, capsys):
    choose_pooling(encoder, mean_tokens=True, cls_token=False)
    assert knnlm("embed", "--data", corpus, "--split", "valid", "--encoder", encoder, "-o", tmp_path / "valid") == 0
    assert "16 dimensions" in capsys.readouterr().out
    dictionary = Dictionary.load(str(Path(corpus) / "dict.txt"))
    sentences = load_sentences(str(corpus), "valid", dictionary)
    array = np.load(tmp_path / "valid/embeddings.npy")
    np.testing.assert_allclose(array[1], alone(encoder, sentences.text(1, dictionary), False), atol=1e-5)
    facts = json.loads((tmp_path / "valid/embeddings.json").read_text())
    digest = hashlib.sha256((encoder / "model.safetensors").read_bytes()).hexdigest()
    assert facts["source"] == {"split": "valid", "encoder": encoder.name, "weights_sha256": [digest]}


def test_a_sentence_that_is_too_long_is_refused(encoder):
    choose_pooling(encoder, mean_tokens=True)
    assert encode_sentences(HFFolder(encoder), [["-"] * 38]).shape == (1, 16)  # with its two marks all 40 positions
    with pytest.raises(KnnlmError, match="reads 40 tokens and a sentence has more"):
        encode_sentences(HFFolder(encoder), [["-"] * 39])


def test_what_is_no_encoder_is_refused(encoder, corpus, tmp_path, capsys):
    def error(folder: Path) -> str:
        return error_of(capsys, "embed", "--data", corpus, "--encoder", folder, "-o", tmp_path / "out")

    assert "there is no folder" in error(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "config.json" in error(tmp_path / "empty")
    choose_pooling(encoder, max_tokens=True)
    assert "max_tokens" in error(encoder)
    (encoder / "1_Pooling/config.json").write_text("[")
    assert "cannot be read" in error(encoder)
    choose_pooling(encoder, mean_tokens=True)
    weights = encoder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    assert "cannot be read as a sentence encoder" in error(encoder)
    weights.write_bytes(whole)
    assert not (tmp_path / "out").exists()
