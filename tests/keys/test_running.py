"""Batches of a model side by side: in order, each with its own keys."""

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from fairseq_knnlm.keys.extractor import KeyExtractor
from fairseq_knnlm.keys.running import for_each_batch, runs_in_threads


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    dictionary = Dictionary()
    for number in range(30):
        dictionary.add_symbol(f"w{number}")
    settings = TransformerLanguageModelConfig(
        decoder_embed_dim=16, decoder_output_dim=16, decoder_input_dim=16, decoder_ffn_embed_dim=32, decoder_layers=2,
        decoder_attention_heads=2, decoder_normalize_before=True, max_target_positions=8,
    )  # fmt: skip
    return TransformerLanguageModel.build_model(settings, LanguageModelingTask(LanguageModelingConfig(), dictionary))


def batches(count: int) -> list[dict]:
    """Of different lengths, most beyond what the model's positions are made for at first."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 40, (count,), generator=generator).tolist()
    return [{"net_input": {"src_tokens": torch.randint(4, 34, (2, n), generator=generator)}} for n in lengths]


@pytest.mark.parametrize("stop_at_the_key", [True, False])
def test_every_batch_gets_its_own_keys_in_order(model, stop_at_the_key, monkeypatch):
    model.eval()
    extractor = KeyExtractor(model, "ffn_input_ln", 1)

    def keys(batch):
        assert not torch.is_grad_enabled()
        if stop_at_the_key:
            return extractor.run(model, batch["net_input"])
        model(**batch["net_input"], features_only=True)
        return extractor.pop()

    some = batches(40)
    assert runs_in_threads(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    together = for_each_batch(model, keys, some)
    with torch.no_grad():
        for batch, ours in zip(some, together):
            torch.testing.assert_close(ours, keys(batch), rtol=1e-5, atol=1e-6)
    extractor.remove()


def test_other_models_see_one_batch_after_the_other():
    seen = []
    lstm = torch.nn.LSTM(4, 4)
    assert not runs_in_threads(lstm)
    assert for_each_batch(lstm, lambda batch: seen.append(batch["n"]) or batch["n"], [{"n": 1}, {"n": 2}]) == [1, 2]
    assert seen == [1, 2]
