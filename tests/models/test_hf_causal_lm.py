"""Models of Hugging Face: scores, generation and keys are those of transformers itself."""

import re

import numpy as np
import pytest
import torch
from commands import eval_lm_here, interactive_here
from hugging_face import CONFIGS, END, POSITIONS, load_transformers, log_probs, split_ids

from fairseq_knnlm.keys import KEYS, KeyExtractor
from fairseq_knnlm.keys.running import for_each_batch, runs_in_threads
from fairseq_knnlm.models.hf_causal_lm import HFCausalLM
from fairseq_knnlm.models.hf_loading import HFFolder

MAIN = ("gpt2", "gpt_neox", "opt", "llama")


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_that_of_transformers(kind, hugging_face, tmp_path):
    """On the same windows: blocks of 32 tokens after 32 others, whose lines follow each other as in the text."""
    hf = hugging_face(kind)
    eval_lm_here(hf.data, hf.path, "--gen-subset", "valid", "--knn-save", tmp_path / "save")
    ids = split_ids(hf.data, "valid")
    expected = log_probs(load_transformers(hf.folder), ids, 32, 32)
    np.testing.assert_array_equal(np.load(tmp_path / "save/tokens.npy"), ids + 4)
    np.testing.assert_allclose(np.load(tmp_path / "save/lm.npy"), expected, atol=1e-5)


def test_lambda_zero_is_the_lm(hugging_face, tmp_path):
    hf = hugging_face()
    eval_lm_here(hf.data, hf.path, "--gen-subset", "train", "--knn-dump", tmp_path / "store")
    knn = ["--knn-datastore", tmp_path / "store", "--knn-lambda", "0"]
    losses = [float(eval_lm_here(hf.data, hf.path, "--gen-subset", "valid", *flags)["loss"]) for flags in ([], knn)]
    expected = -log_probs(load_transformers(hf.folder), split_ids(hf.data, "valid"), 32, 32).mean() / np.log(2)
    assert losses == pytest.approx([expected, expected], abs=1e-5)


GENERATION = ["--max-len-b", "30", "--buffer-size", "8", "--max-tokens", "2000"]


def hypotheses(output: str) -> dict[int, tuple[list[str], list[float]]]:
    """Of each prompt the symbols of its best hypothesis, and log p of each."""
    texts = {int(n): text.split() for n, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)}
    scores = {int(n): list(map(float, s.split())) for n, s in re.findall(r"^P-(\d+)\t(.*)$", output, re.MULTILINE)}
    return {n: (texts[n], [score * np.log(2) for score in scores[n]]) for n in texts}


@pytest.mark.parametrize("kind", MAIN)
def test_generation_is_that_of_transformers(kind, hugging_face):
    """Greedily token for token, in a batch of prompts of different lengths."""
    hf = hugging_face(kind)
    model, text = load_transformers(hf.folder), HFCausalLM.of_folder(HFFolder.at(hf.folder)).text
    prompts = ["w1 w2 w3", "w7", "= Ein Titel"]
    found = hypotheses(interactive_here(hf.data, hf.path, prompts, *GENERATION, "--beam", "1").stdout)
    dictionary = text.dictionary()
    for number, prompt in enumerate(prompts):
        start = torch.tensor([[0, *(token - 4 for token in text.prompt(prompt))]])
        theirs = model.generate(start, do_sample=False, max_length=31, pad_token_id=1)[0, 1:].tolist()
        expected = [dictionary[token + 4] for token in theirs]
        assert found[number][0] == [symbol for symbol in expected if symbol != END]
        assert len(expected) > len(text.prompt(prompt))


@pytest.mark.parametrize("kind", MAIN)
def test_a_beam_has_the_scores_of_transformers(kind, hugging_face):
    hf = hugging_face(kind)
    model, dictionary = load_transformers(hf.folder), HFCausalLM.of_folder(HFFolder.at(hf.folder)).decoder.dictionary
    found = hypotheses(interactive_here(hf.data, hf.path, ["w1 w2", "w7"], *GENERATION, "--beam", "4").stdout)
    for symbols, scores in found.values():
        ids = np.array([dictionary.index(symbol) - 4 for symbol in symbols])
        expected = log_probs(model, ids, POSITIONS, 0)
        prompt = 12  # more than its tokens, whose scores are not the model's
        assert len(symbols) > prompt
        np.testing.assert_allclose(scores[prompt : len(ids)], expected[prompt:], atol=1e-3)


@pytest.mark.parametrize("kind", MAIN)
def test_incremental_states_are_those_of_the_whole_text(kind, hugging_face):
    """Step by step, with rows that are exchanged, doubled and dropped on the way, as a beam search does."""
    model = HFCausalLM.of_folder(HFFolder.at(hugging_face(kind).folder)).eval()
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(4, 300, (3, 12)))
    tokens[:, 0] = 2
    state: dict = {}
    with torch.no_grad():
        for step in range(1, 13):
            if step == 5:
                order = torch.tensor([2, 0, 0, 1])
            elif step == 9:
                order = torch.tensor([1, 3])
            else:
                order = torch.arange(len(tokens))
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
            tokens[:, step - 1] += torch.arange(len(tokens)) * (step > 1)  # rows that were doubled go their own ways
            ours, _ = model.decoder(tokens[:, :step], incremental_state=state)
            whole, _ = model(tokens[:, :step])
            torch.testing.assert_close(ours[:, -1], whole[:, -1], rtol=1e-4, atol=1e-4)


def test_special_symbols_have_no_probability(hugging_face):
    model = HFCausalLM.of_folder(HFFolder.at(hugging_face().folder)).eval()
    with torch.no_grad():
        p = model.get_normalized_probs(model(torch.tensor([[2, 50, 60]])), log_probs=False)
    assert p.shape[-1] == 308 and (p[..., :4] == 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 3))


# --- keys -----------------------------------------------------------------------------------------------------------


def states_by_hand(kind: str, model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The six states of the last layer, with the parts of the layer called one by one."""
    hidden = model.base_model(ids, output_hidden_states=True, use_cache=False).hidden_states
    before, after_norm = hidden[-2], hidden[-1]
    captured: dict[str, torch.Tensor] = {}
    part = {
        "gpt2": "transformer.h.1.attn", "gpt_neo": "transformer.h.1.attn", "gpt_neox": "gpt_neox.layers.1.attention",
        "opt": "model.decoder.layers.1.self_attn",
    }.get(kind, "model.layers.1.self_attn")  # fmt: skip
    attention = model.get_submodule(part)
    handle = attention.register_forward_hook(lambda _, __, output: captured.update(attention=output[0]))
    model.base_model(ids, use_cache=False)
    handle.remove()
    layer = model.get_submodule(part.rsplit(".", 1)[0])
    norms = {
        "gpt2": ("ln_1", "ln_2", "mlp"),
        "gpt_neo": ("ln_1", "ln_2", "mlp"),
        "opt": ("self_attn_layer_norm", "final_layer_norm", None),
    }.get(kind, ("input_layernorm", "post_attention_layernorm", "mlp"))
    first, second = getattr(layer, norms[0]), getattr(layer, norms[1])
    ffn = getattr(layer, norms[2]) if norms[2] else lambda state: layer.fc2(layer.activation_fn(layer.fc1(state)))
    middle = before + captured["attention"]
    ffn_input = before if kind == "gpt_neox" else middle  # parallel residuals: both parts read the layer's input
    output = middle + ffn(second(ffn_input))
    return {
        "attn_input": before, "attn_input_ln": first(before), "ffn_input": ffn_input, "ffn_input_ln": second(ffn_input),
        "output": output, "output_ln": after_norm,
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_six_keys(kind, hugging_face):
    hf = hugging_face(kind)
    model = HFCausalLM.of_folder(HFFolder.at(hf.folder)).eval()
    tokens = torch.from_numpy(np.random.default_rng(1).integers(4, 300, (2, 9)))
    expected = states_by_hand(kind, load_transformers(hf.folder), tokens - 4)
    for key in KEYS:
        extractor = KeyExtractor(model, key, layer=1)
        ours = extractor.run(model, {"src_tokens": tokens})
        torch.testing.assert_close(ours, expected[key], rtol=1e-4, atol=1e-4, msg=key)
        model(tokens, features_only=True)
        torch.testing.assert_close(extractor.pop(), ours)
        extractor.remove()


@torch.no_grad()
def test_the_norm_that_stands_in_is_of_the_same_kind(hugging_face):
    """``output_ln`` of a layer that is not the last: RMS where the model has RMS norms."""
    for kind, norm in (("llama", torch.nn.functional.rms_norm), ("gpt2", torch.nn.functional.layer_norm)):
        model = HFCausalLM.of_folder(HFFolder.at(hugging_face(kind).folder)).eval()
        tokens = torch.tensor([[2, 40, 41]])
        plain, normed = KeyExtractor(model, "output", 0), KeyExtractor(model, "output_ln", 0)
        model(tokens, features_only=True)
        torch.testing.assert_close(normed.pop(), norm(plain.pop(), (32,)))


@pytest.mark.parametrize("kind", MAIN)
def test_batches_go_through_at_the_same_time(kind, hugging_face, monkeypatch):
    model = HFCausalLM.of_folder(HFFolder.at(hugging_face(kind).folder)).eval()
    extractor = KeyExtractor(model, "ffn_input_ln", 1)
    rng = np.random.default_rng(2)
    rows = [torch.from_numpy(rng.integers(4, 300, (2, length))) for length in rng.integers(2, 40, 30)]
    batches = [{"net_input": {"src_tokens": tokens}} for tokens in rows]
    assert runs_in_threads(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def keys(batch: dict) -> torch.Tensor:
        return extractor.run(model, batch["net_input"])

    together = for_each_batch(model, keys, batches)
    with torch.no_grad():
        for batch, ours in zip(batches, together):
            torch.testing.assert_close(ours, keys(batch), rtol=1e-5, atol=1e-5)
