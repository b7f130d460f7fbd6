"""Tiny random models of Hugging Face with a tiny tokenizer, and what transformers itself says of a text."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from tiny import make_lines

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched

POSITIONS = 64
TYPES = 300
END = "<|endoftext|>"
SIZES = {"vocab_size": TYPES + 4, "initializer_range": 0.4}  # more rows than the tokenizer has tokens, as in Pythia
ROPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
# class of the configuration, its settings
CONFIGS = {
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": POSITIONS,
         "attention_types": [[["global", "local"], 1]], "window_size": 16},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**ROPE, "use_parallel_residual": True}),
    "opt": (
        "OPTConfig",
        {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32,
         "max_position_embeddings": POSITIONS, "init_std": 0.4},
    ),
    "llama": ("LlamaConfig", {**ROPE, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {**ROPE, "num_key_value_heads": 1, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {**ROPE, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {**ROPE, "num_key_value_heads": 1, "head_dim": 16}),
    "smollm3": ("SmolLM3Config", {**ROPE, "num_key_value_heads": 1, "pad_token_id": 1}),
}  # fmt: skip


def text_lines(lines: int, seed: int) -> list[str]:
    """Sentences with blank lines, indents, double blanks, letters of several bytes, and now and then an emoji."""
    odd = ["", "  indented é line", "= Ein Titel =", "\tnaïve  café 🙂 end", "word"]
    plain = make_lines(lines, seed)
    return [odd[number // 7 % len(odd)] if number % 7 == 3 else line for number, line in enumerate(plain)]


def make_tokenizer(folder: Path):
    """A byte-level BPE of some text; its first token is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from fairseq_knnlm.data.hf_tokenizer import import_transformers

    transformers = import_transformers()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TYPES, special_tokens=[END, "<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(("\n".join(text_lines(200, 5)) + "\n",), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
    fast.save_pretrained(str(folder))
    return fast


def make_model(folder: Path, kind: str, **changes: object) -> Path:
    """A folder with a random model of this kind."""
    from fairseq_knnlm.data.hf_tokenizer import import_transformers

    transformers = import_transformers()
    name, settings = CONFIGS[kind]
    torch.manual_seed(len(kind))
    config = getattr(transformers, name)(**{**SIZES, **settings, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # whose norms and biases are 1 and 0 at first, and hide mistakes
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(str(folder), safe_serialization=True)
    make_tokenizer(folder)
    return folder


def load_transformers(folder: Path):
    """The model as transformers loads it."""
    from fairseq_knnlm.data.hf_tokenizer import import_transformers

    model = import_transformers().AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return model.eval()


def split_ids(data: Path, split: str) -> np.ndarray:
    """The tokenizer's ids of a binarised split."""
    record = json.loads((data / "hugging_face.json").read_text())
    dtype = np.uint16 if record["dictionary_size"] < 65500 else np.int32
    return np.fromfile(data / f"{split}.bin", dtype).astype(np.int64) - 4


def windows(ids: np.ndarray, length: int, context: int):
    """Of a text: the inputs of each block of ``length`` tokens after ``context`` others, its targets, and its first."""
    stream = np.concatenate([[0], ids])  # the end of a text comes before it
    for start in range(0, len(ids), length):
        stop, first = min(start + length, len(ids)), max(0, start - context)
        yield torch.from_numpy(stream[first:stop]), torch.from_numpy(ids[first:stop]), start - first


@torch.no_grad()
def log_probs(model, ids: np.ndarray, length: int, context: int) -> np.ndarray:
    """log p of every token, by transformers alone, window by window."""
    parts = []
    for inputs, targets, own in windows(ids, length, context):
        logits = model(inputs[None]).logits[0].double().log_softmax(-1)
        parts.append(logits.gather(1, targets[:, None])[own:, 0])
    return torch.cat(parts).numpy()
