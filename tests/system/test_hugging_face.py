"""A model of Hugging Face through every command: mixtures against NumPy, raw text, the page, Python, bad input."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from commands import error_of, eval_lm_here, interactive_here, knnlm, run, sentence_of
from hugging_face import load_transformers, log_probs, make_model, split_ids, text_lines
from reference import cache_probability, knn_distribution, knn_probability, load, mixture

from fairseq_knnlm import KNNLM, Datastore, KnnlmError
from fairseq_knnlm.keys import KeyExtractor
from fairseq_knnlm.models.hf_causal_lm import HFCausalLM
from fairseq_knnlm.models.hf_loading import HFFolder

VALID = ["--gen-subset", "valid"]


@pytest.fixture(scope="module")
def hf(hugging_face):
    return hugging_face("llama")


@pytest.fixture(scope="module")
def store(hf, made_once):
    """A datastore of train, with keys in full precision."""

    def fill(folder):
        flags = ["--gen-subset", "train", "--knn-dump", folder / "store", "--knn-key-dtype", "float32"]
        eval_lm_here(hf.data, hf.path, *flags, "--knn-index", "auto")

    return made_once("hugging-face-store", fill) / "store"


@pytest.fixture(scope="module")
def queries(hf, made_once):
    """The keys of valid, which are its queries."""

    def fill(folder):
        eval_lm_here(hf.data, hf.path, *VALID, "--knn-dump", folder / "store", "--knn-key-dtype", "float32")

    return load(Datastore(made_once("hugging-face-queries", fill) / "store"))


def test_a_mixture_of_datastore_and_cache(hf, store, queries, tmp_path):
    """Against NumPy, from the states and from what transformers says of the text."""
    flags = ["--knn-datastore", store, "--knn-k", "16", "--knn-lambda", "0.3", "--knn-temperature", "20"]
    cache = ["--knn-cache-size", "50", "--knn-cache-lambda", "0.1", "--knn-cache-theta", "0.02"]
    loss = float(eval_lm_here(hf.data, hf.path, *VALID, *flags, *cache)["loss"])
    states, tokens = queries
    lm = log_probs(load_transformers(hf.folder), split_ids(hf.data, "valid"), 32, 32)
    knn = knn_probability(states, tokens, *load(Datastore(store)), 16, 20)
    expected = mixture(lm, [knn, cache_probability(states, tokens, 50, 0.02)], [0.3, 0.1])
    assert loss == pytest.approx(-expected.mean() / np.log(2), abs=1e-4)


def test_the_datastore_holds_the_text(hf, store):
    datastore = Datastore(store)
    text = (hf.data.parent / "train.txt").read_text()
    lm = KNNLM.from_pretrained(hf.folder, datastore=store)
    assert lm._scorer.text.passage(datastore.values[:].tolist()) == text
    assert datastore.manifest.source["dictionary_size"] == 308


def test_perplexity_per_word_and_bits_per_byte(hf, store, tmp_path, caplog, capsys):
    """In the summary, in the save, and where it is tuned; parts of a split have their own words."""
    flags = ["--knn-datastore", store, "--knn-save"]
    for part in (0, 1):
        with caplog.at_level("INFO"):
            shard = ["--num-shards", "2", "--shard-id", part]
            eval_lm_here(hf.data, hf.path, *VALID, *flags, tmp_path / f"save{part}", *shard)
    runs = [json.loads((tmp_path / f"save{part}/run.json").read_text()) for part in (0, 1)]
    text = (hf.data.parent / "valid.txt").read_text()
    assert sum(run["words"] for run in runs) == pytest.approx(len(text.split()))
    assert sum(run["bytes"] for run in runs) == pytest.approx(len(text.encode()))
    lm = np.load(tmp_path / "save1/lm.npy").astype(np.float64).sum()
    shown = re.findall(r"base LM ([\d.]+) per word, ([\d.]+) bits per byte", caplog.text)[-1]
    expected = [np.exp(-lm / runs[1]["words"]), -lm / runs[1]["bytes"] / np.log(2)]
    assert [float(number) for number in shown] == pytest.approx(expected, rel=1e-3)
    assert knnlm("tune", tmp_path / "save0", "--report", tmp_path / "save1", "--json") == 0
    report = json.loads(capsys.readouterr().out)["results"]["valid, report"]
    assert report["lm_per_word"] == pytest.approx(expected[0], rel=1e-3) and report["words"] == runs[1]["words"]
    assert knnlm("tune", tmp_path / "save0", "--keep") == 0
    assert "per word, valid, tuned on it" in capsys.readouterr().out
    (store / "tuned.json").unlink()


def test_a_gate(hf, store, tmp_path):
    """Weights by context for such a model: scored as its training promised, and generated with."""
    for split in ("train", "valid"):
        flags = ["--gen-subset", split, "--knn-datastore", store, "--knn-save", tmp_path / split]
        eval_lm_here(hf.data, hf.path, *flags)
    assert knnlm("gate", tmp_path / "train", "-o", tmp_path / "gate", "--report", tmp_path / "valid") == 0
    promised = json.loads((tmp_path / "gate").read_text())["results"]
    gated = ["--knn-datastore", store, "--knn-gate", tmp_path / "gate"]
    loss = float(eval_lm_here(hf.data, hf.path, *VALID, *gated)["loss"])
    numbers = [value for row in promised.values() if isinstance(row, dict) for value in row.values()]
    assert any(2**loss == pytest.approx(value, rel=1e-4) for value in numbers if isinstance(value, float)), promised
    output = interactive_here(hf.data, hf.path, ["w1 w2"], "--beam", "1", "--max-len-b", "20", *gated).stdout
    assert "H-0" in output


@torch.no_grad()
def test_generation_with_the_mixture(hf, store):
    """Every token that is generated greedily is the most probable one of the mixture, by transformers and NumPy."""
    flags = ["--beam", "1", "--max-len-b", "40", "--knn-datastore", store, "--knn-lambda", "0.5", "--knn-k", "16"]
    output = interactive_here(hf.data, hf.path, ["w1 w2"], *flags, "--knn-temperature", "20").stdout
    symbols = re.search(r"^H-0\t\S+\t(.*)$", output, re.MULTILINE)[1].split()
    model = HFCausalLM.of_folder(HFFolder.at(hf.folder)).eval()
    tokens = [model.decoder.dictionary.index(symbol) for symbol in symbols]
    prompt = len(model.text.prompt("w1 w2"))
    assert tokens[:prompt] == model.text.prompt("w1 w2") and len(tokens) > prompt + 5
    inputs = torch.tensor([[2, *tokens[:-1]]])
    queries = KeyExtractor(model, "ffn_input_ln", 1).run(model, {"src_tokens": inputs})[0].numpy()
    ids = torch.where(inputs < 4, 0, inputs - 4)
    lm = load_transformers(hf.folder)(ids).logits[0].double().softmax(-1).numpy()
    p = 0.5 * knn_distribution(queries, *load(Datastore(store)), 16, 20, vocabulary=308)
    p[:, 4:] += 0.5 * lm
    own = p[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(own[prompt:], p[prompt:].max(axis=1), rtol=1e-4)


def test_cache_boundaries_are_lines_of_the_text(hf, tmp_path):
    cache = ["--knn-cache-size", "400", "--knn-cache-lambda", "0.5", "--knn-cache-boundary"]
    losses = [eval_lm_here(hf.data, hf.path, *VALID, *cache, line)["loss"] for line in ("= Ein Titel =", "re:= .* =")]
    assert losses[0] == losses[1] != eval_lm_here(hf.data, hf.path, *VALID, *cache[:4])["loss"]
    assert "no line of the text" in sentence_of(eval_lm_here, hf.data, hf.path, *VALID, *cache, "No such line")


def test_raw_text_with_the_models_own_tokenizer(hf, store, tmp_path, capsys):
    """knnlm score with the data folder, with the Hugging Face folder alone, and by transformers."""
    lines = ["w1 w2 w3  naïve", "= Ein Titel ="]
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    model = load_transformers(hf.folder)
    flags = ["--knn-datastore", store, "--knn-lambda", "0.2", "--json", "--tokens", tmp_path / "text.txt"]
    totals = []
    for place in (["--path", hf.path, "--data", hf.data], ["--path", hf.folder]):
        assert knnlm("score", *place, *flags) == 0
        *rows, total = map(json.loads, capsys.readouterr().out.splitlines())
        totals.append(total["total"])
        tokenizer = KNNLM.from_pretrained(hf.folder)._scorer.text
        for row, line in zip(rows, lines):
            ids = np.array(tokenizer.encode(line)) - 4
            assert row["lm"]["log_prob"] == pytest.approx(log_probs(model, ids, 64, 0).sum(), abs=1e-3)
            assert "".join(token["token"] for token in row["token_scores"]).startswith(line[:10])
    assert totals[0] == totals[1]
    log_prob = totals[0]["lm"]["log_prob"]
    assert totals[0]["lm_per_word"] == pytest.approx(np.exp(-log_prob / 8), rel=1e-4)
    size = (tmp_path / "text.txt").stat().st_size
    assert totals[0]["lm_bits_per_byte"] == pytest.approx(-log_prob / size / np.log(2), abs=1e-4)
    assert knnlm("score", "--path", hf.folder, tmp_path / "text.txt") == 0
    assert "per word" in capsys.readouterr().out


def test_the_page_shows_text(hf, store, tmp_path):
    page = tmp_path / "page.html"
    flags = ["--datastore", store, "--text", "w1 w2\nnaïve café", "-o", page]
    assert knnlm("inspect", "--path", hf.path, "--data", hf.data, *flags) == 0
    html = page.read_text()
    symbols = [json.dumps(symbol)[1:-1] for symbol in "ĠĊ\u23ce"]  # as they are written in JSON
    assert [symbol in html for symbol in symbols] == [False, False, True] and '" w' in html
    split = ["--split", "valid", "--tokens", 30]
    assert knnlm("inspect", "--path", hf.path, "--data", hf.data, *flags[:2], *split, "-o", page) == 0
    assert symbols[0] not in page.read_text()


def test_the_live_page_continues_a_text(hf, store):
    from fairseq_knnlm.inspector.collect import Inspector
    from fairseq_knnlm.inspector.examples import example_texts
    from fairseq_knnlm.inspector.server import LiveInspector

    lm = KNNLM.from_pretrained(hf.folder, datastore=store)
    torch.manual_seed(0)
    answer = LiveInspector(Inspector.of(lm._scorer)).continue_("w1 w2\nw3")
    assert answer["text"].startswith("w1 w2\nw3") and len(answer["text"]) > 12
    examples = example_texts(hf.data, lm.dictionary, lm._scorer.text)
    text = (hf.data.parent / "valid.txt").read_text()
    assert examples and all(line in text for example in examples for line in example.splitlines())


def test_python(hf, store):
    """A folder of Hugging Face is all that from_pretrained needs; its scores are those of the data's checkpoint."""
    lm = KNNLM.from_pretrained(hf.folder, datastore=store, lambda_=0.25, temperature=10, k=8)
    text = "w1 w2 w3\nw4 w5"
    scores = lm.score(text)
    assert "".join(scores.tokens) == text + "\n"
    ids = np.array(lm._scorer.text.ids(text + "\n")) - 4
    np.testing.assert_allclose(scores.lm_log_probs, log_probs(load_transformers(hf.folder), ids, 64, 0), atol=1e-4)
    prepared = KNNLM.from_pretrained(hf.data, "checkpoint.pt", datastore=store, lambda_=0.25, temperature=10, k=8)
    assert prepared.score(text).log_probs == pytest.approx(scores.log_probs, abs=1e-5)
    sample = lm.sample("w1 w2", tokens=10, seed=3)
    assert sample.startswith("w1 w2") and len(sample) > 5
    (train, *_) = [line for line in (hf.data.parent / "train.txt").read_text().splitlines() if len(line) > 60]
    near = lm.neighbors(train[:40])
    assert near and all("Ġ" not in neighbor.context for neighbor in near)


def test_half_precision_and_other_weights(hf, store, tmp_path):
    """--dtype of the data folder; the datastore says that the weights are others."""
    for dtype in ("bfloat16", "float16"):
        flags = ["--validpref", hf.data.parent / "valid.txt", "--destdir", tmp_path / dtype, "--dtype", dtype]
        assert knnlm("hf", "prepare", hf.folder, *flags) == 0
    exact = float(eval_lm_here(hf.data, hf.path, *VALID)["loss"])
    loss = float(eval_lm_here(tmp_path / "bfloat16", tmp_path / "bfloat16/checkpoint.pt", *VALID)["loss"])
    assert loss == pytest.approx(exact, rel=0.05) and loss != exact


def test_as_processes(hf, tmp_path):
    """The commands as a user types them, once; and the pointer holds no weights, and loads as weights only."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(text_lines(10, 9)) + "\n")
    output = run("knnlm", "hf", "prepare", hf.folder, "--validpref", text, "--destdir", tmp_path / "bin").stdout
    assert re.search(r"valid +10 ", output) and "fairseq-eval-lm" in output
    pointer = tmp_path / "bin/checkpoint.pt"
    assert pointer.stat().st_size < 10_000
    assert torch.load(pointer, weights_only=True)["cfg"]["model"]["_name"] == "hf_causal_lm"
    task = ["--user-dir", "fairseq_knnlm", "--task", "knn_language_modeling", "--cpu", "--num-workers", "0"]
    result = run("fairseq-eval-lm", tmp_path / "bin", "--path", pointer, *VALID, "--tokens-per-sample", "64", *task)
    expected = -log_probs(load_transformers(hf.folder), split_ids(tmp_path / "bin", "valid"), 64, 0).mean() / np.log(2)
    assert float(re.search(r"Loss \(base 2\): ([\d.]+)", result.stderr)[1]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_the_recipe(hf, tmp_path):
    """From two texts to the table, run twice: the second time everything is done."""
    for seed, name in enumerate(("wiki", "novels")):
        (tmp_path / name).mkdir()
        for split in ("train", "valid"):
            (tmp_path / name / f"{split}.txt").write_text("\n".join(text_lines(400, seed)) + "\n")
    settings = {
        "MODEL": hf.folder, "TEXT": tmp_path / "wiki", "OTHER": tmp_path / "novels", "WORK": tmp_path / "work",
        "WORDS": 2000, "WORDS_SCORED": 600, "CONTEXT": 16, "BLOCK": 32, "CACHE": 100, "DETOKENISE": 1,
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    outputs = [run("bash", "examples/hugging_face/run.sh", env=environment).stdout for _ in range(2)]
    assert "done before" not in outputs[0] and outputs[1].count("done before") == 14
    content = json.loads((tmp_path / "work/results/hugging_face.json").read_text())
    assert list(content["runs"]) == ["text-text", "other-other", "other-text"]
    first = content["runs"]["text-text"]
    assert first["entries"] == len(Datastore(tmp_path / "work/datastore-text"))
    assert first["rows"]["+ kNN + cache"]["mixture"] <= first["rows"]["+ kNN"]["lm"]
    page = (tmp_path / "work/results/hugging_face.md").read_text()
    assert "14.84" in page and f"{first['rows']['+ kNN']['mixture_per_word']:.2f}" in page


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(hf, tmp_path):
    """A copy of the model, to be damaged."""
    return shutil.copytree(hf.folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no *.safetensors"),
        ("config.json", "no config.json"),
    ],
)  # fmt: skip
def test_a_folder_that_lacks_something(broken, missing, sentence, capsys, hf, tmp_path):
    (broken / missing).unlink()
    text = hf.data.parent / "valid.txt"
    assert sentence in error_of(capsys, "hf", "prepare", broken, "--validpref", text, "--destdir", tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


def test_pickled_weights_are_not_read(broken, capsys, hf, tmp_path):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    flags = ["--validpref", hf.data.parent / "valid.txt", "--destdir", tmp_path / "bin"]
    assert "pickled" in error_of(capsys, "hf", "prepare", broken, *flags)


def test_models_that_are_no_causal_lms(broken, capsys, hf, tmp_path):
    """An encoder; an architecture that is not in the table; and layers that normalise their output."""
    flags = ["--validpref", hf.data.parent / "valid.txt", "--destdir", tmp_path / "bin"]
    config = json.loads((broken / "config.json").read_text())
    for model_type, architecture, sentence in (
        ("bert", "BertForMaskedLM", "no causal language model"),
        ("bloom", "BloomForCausalLM", "HUGGING_FACE in fairseq_knnlm/keys/families.py"),
    ):
        content = {**config, "model_type": model_type, "architectures": [architecture]}
        (broken / "config.json").write_text(json.dumps(content))
        assert sentence in error_of(capsys, "hf", "prepare", broken, *flags)
    make_model(tmp_path / "post", "opt", do_layer_norm_before=False)
    assert knnlm("hf", "prepare", tmp_path / "post", *flags) == 0
    dump = ["--knn-dump", tmp_path / "store"]
    assert "post-norm" in sentence_of(eval_lm_here, tmp_path / "bin", tmp_path / "bin/checkpoint.pt", *VALID, *dump)


def test_weights_that_lack_a_layer(broken, hf):
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    save_file({name: value for name, value in weights.items() if "layers.1.mlp" not in name},
              broken / "model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(KnnlmError, match=r"lack model\.layers\.1\.mlp"):
        KNNLM.from_pretrained(broken)


def test_data_and_model_that_do_not_match(hf, corpus, capsys, tmp_path):
    assert "not that of the tokenizer" in sentence_of(eval_lm_here, corpus, hf.path, *VALID)
    score = ["score", "--path", hf.folder, "--data", corpus, corpus / "dict.txt"]
    assert "not that of the tokenizer" in error_of(capsys, *score)
    data = shutil.copytree(hf.data, tmp_path / "bin")
    (data / "valid.counts.npy").write_bytes((data / "train.counts.npy").read_bytes())
    assert "prepare again" in sentence_of(eval_lm_here, data, hf.path, *VALID)


def test_data_of_fairseq_preprocess(hf, tmp_path):
    """With the same dictionary, but ends of lines that the model knows nothing of."""
    from commands import preprocess_here

    (tmp_path / "text.txt").write_text("w 1\nw 2\nw 1\n")
    data = preprocess_here(tmp_path / "bin", hf.data / "dict.txt", valid=tmp_path / "text.txt")
    assert "knnlm hf prepare" in sentence_of(eval_lm_here, data, hf.path, *VALID)


def test_too_much_context(hf):
    flags = ["--tokens-per-sample", "96", "--context-window", "48"]
    assert "use --tokens-per-sample 64 or less" in sentence_of(eval_lm_here, hf.data, hf.path, *VALID, *flags)


def test_a_model_that_has_gone_or_changed(broken, hf, tmp_path):
    flags = ["--validpref", hf.data.parent / "valid.txt", "--destdir", tmp_path / "bin"]
    assert knnlm("hf", "prepare", broken, *flags) == 0
    pointer = tmp_path / "bin/checkpoint.pt"
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace("}", ' ,"other": 1}', 1))
    assert "is another than" in sentence_of(eval_lm_here, tmp_path / "bin", pointer, *VALID)
    shutil.rmtree(broken)
    assert "not in" in sentence_of(eval_lm_here, tmp_path / "bin", pointer, *VALID)


def test_flags_that_make_no_sense(hf, capsys, tmp_path):
    text = hf.data.parent / "valid.txt"
    assert "leave out --add-bos-token" in sentence_of(eval_lm_here, hf.data, hf.path, *VALID, "--add-bos-token")
    assert "tokenizer of its own" in error_of(capsys, "score", "--path", hf.folder, "--tokenizer", "moses", text)
    assert "give --data" in error_of(capsys, "score", "--path", tmp_path / "no.pt", text)
    assert "exists already" in error_of(capsys, "hf", "prepare", hf.folder, "--validpref", text, "--destdir", hf.data)
    assert "no text to prepare" in error_of(capsys, "hf", "prepare", hf.folder, "--destdir", tmp_path / "x")
    assert "has no no.gguf" in error_of(
        capsys, "hf", "prepare", hf.folder, "--gguf", "no.gguf", "--validpref", text, "--destdir", tmp_path / "x"
    )


def test_without_transformers(hf, monkeypatch, capsys, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    flags = ["--validpref", hf.data.parent / "valid.txt", "--destdir", tmp_path / "bin"]
    assert "pip install 'fairseq-knnlm[hf]'" in error_of(capsys, "hf", "prepare", hf.folder, *flags)
