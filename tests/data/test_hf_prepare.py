"""Text for models of Hugging Face: the tokens of the whole text, its words and bytes, and a dictionary of the ids."""

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from hugging_face import END, make_tokenizer, text_lines

pytest.importorskip("tokenizers", reason="tokenizers is not installed; the extra hf brings it")

from fairseq_knnlm import KnnlmError
from fairseq_knnlm.data.hf_prepare import binarise, read_chunks
from fairseq_knnlm.data.hf_tokenizer import DictionaryWords, HFTokenizer, import_transformers
from fairseq_knnlm.data.text_counts import TextCounts, count_text

SIZE = 320


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> HFTokenizer:
    return HFTokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), SIZE, "here")


@pytest.fixture(scope="module")
def with_prefix() -> HFTokenizer:
    """As Llama's: blanks are part of words, a text begins with one, and <s> is put before it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((f"{line} " for line in text_lines(50, 1)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return HFTokenizer(fast, SIZE, "here")


@pytest.mark.parametrize("kind", ["byte_level", "with_prefix"])
@pytest.mark.parametrize("ending", ["\n", "", "\n\n \n"])
def test_chunks_give_the_tokens_of_the_whole_text(kind, ending, request, tmp_path, monkeypatch):
    tokenizer: HFTokenizer = request.getfixturevalue(kind)
    text = "\n".join(text_lines(120, 3)) + ending
    (tmp_path / "text").write_text(text)
    monkeypatch.setattr("fairseq_knnlm.data.hf_prepare.CHUNK", 200)
    monkeypatch.setattr(read_chunks, "__defaults__", (200,))
    assert len(list(read_chunks(tmp_path / "text"))) > 10
    size = binarise(tokenizer, SIZE + 4, str(tmp_path / "text"), tmp_path, "train")
    lines = data_utils.load_indexed_dataset(str(tmp_path / "train"), None)
    tokens = np.concatenate([line.numpy() for line in lines])
    np.testing.assert_array_equal(tokens, tokenizer.ids(text))
    assert (size.tokens, size.words, size.bytes) == (len(tokens), len(text.split()), len(text.encode()))
    assert size.lines == len(lines)
    assert all(tokenizer.passage(line.tolist()).endswith("\n") for line in list(lines)[:-1])


def test_words_and_bytes_of_a_part(byte_level, tmp_path):
    """At the ends of lines exactly; inside of a line in proportion."""
    lines = ["one two three", "", "four", "five six é"]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    binarise(byte_level, SIZE + 4, str(tmp_path / "text"), tmp_path, "valid")
    dataset = data_utils.load_indexed_dataset(str(tmp_path / "valid"), None)  # which closes its map when it is gone
    lengths = np.array(dataset.sizes)
    assert len(lengths) == 4
    ends = np.cumsum(lengths)
    assert count_text(tmp_path / "valid", lengths, 0, ends[-1]) == TextCounts(7, 14 + 1 + 5 + 12)
    assert count_text(tmp_path / "valid", lengths, ends[0], ends[2]) == TextCounts(1, 6)
    first, second = (count_text(tmp_path / "valid", lengths, *part) for part in ((0, 3), (3, ends[-1])))
    assert first.words + second.words == pytest.approx(7) and 0 < first.words < 3
    with pytest.raises(KnnlmError, match="prepare again"):
        count_text(tmp_path / "valid", lengths[:2], 0, 3)


def test_the_dictionary_is_the_vocabulary_in_order(byte_level, tmp_path):
    """Every id has its symbol, fairseq reads it back, and a name that fairseq has itself is another there."""
    dictionary = byte_level.dictionary()
    dictionary.save(str(tmp_path / "dict.txt"))
    again = Dictionary.load(str(tmp_path / "dict.txt"))
    assert again.symbols == dictionary.symbols and len(again) == SIZE + 4
    assert dictionary[4] == END and dictionary[5] == "<s>#1" and dictionary[SIZE + 3].startswith("<unused>")
    words = DictionaryWords(byte_level, dictionary)
    for text in ("w1 w2\n  naïve  🙂", " = x =\n\n"):
        symbols = words.encode(text)
        assert again.encode_line(symbols, add_if_not_exist=False, append_eos=False).tolist() == byte_level.ids(text)
        assert words.decode(symbols) == text


@pytest.mark.parametrize("kind", ["byte_level", "with_prefix"])
def test_text_that_goes_on(kind, request):
    tokenizer: HFTokenizer = request.getfixturevalue(kind)
    whole = tokenizer.ids("w1 w2 w3 w4\nw5")
    prompt = tokenizer.prompt("w1 w2")
    assert whole[: len(prompt)] == prompt
    assert tokenizer.continued("w1 w2", whole[len(prompt) :]) == "w1 w2 w3 w4\nw5"
    assert tokenizer.continued("w1 w2", [*whole[len(prompt) :], tokenizer.end]) == "w1 w2 w3 w4\nw5"


def test_what_a_text_begins_with(byte_level, with_prefix):
    """The token that the tokenizer puts there, or else its own bos."""
    assert (byte_level.start, byte_level.end) == (0, 4)
    assert (with_prefix.start, with_prefix.end) == (1, 6)


def test_bad_text(byte_level, tmp_path):
    (tmp_path / "latin1").write_bytes(b"good line\ncaf\xe9\n")
    with pytest.raises(KnnlmError, match=r"line 2 of .*latin1 is not UTF-8 \(byte 13\)"):
        binarise(byte_level, SIZE + 4, str(tmp_path / "latin1"), tmp_path, "train")
    (tmp_path / "empty").write_text("")
    with pytest.raises(KnnlmError, match="is empty"):
        binarise(byte_level, SIZE + 4, str(tmp_path / "empty"), tmp_path, "train")
    assert {path.name for path in tmp_path.iterdir()} == {"latin1", "empty"}


def test_a_tokenizer_of_another_model(tmp_path):
    with pytest.raises(KnnlmError, match="do not belong together"):
        HFTokenizer(make_tokenizer(tmp_path), 100, "here")
