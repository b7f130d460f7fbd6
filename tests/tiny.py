"""A small text and a small untrained model, made in this process in a second: for tests that need any model at all."""

from pathlib import Path

import numpy as np
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_builder
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

WORDS = 200
ADAPTIVE = [
    "--adaptive-input", "--adaptive-input-cutoff", "50,120", "--adaptive-softmax-cutoff", "50,120",
    "--adaptive-input-factor", "2", "--adaptive-softmax-factor", "2", "--tie-adaptive-weights",
    "--tie-adaptive-proj", "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp",
]  # fmt: skip


def make_dictionary() -> Dictionary:
    dictionary = Dictionary()
    for number in range(WORDS):
        dictionary.add_symbol(f"w{number}", n=WORDS - number)
    return dictionary


def make_lines(lines: int, seed: int) -> list[str]:
    """Sentences of a small random grammar: repetitive enough for retrieval to help."""
    rng, grammar = np.random.default_rng(seed), np.random.default_rng(7)
    followers = {word: grammar.choice(WORDS, 4) for word in range(WORDS)}
    text = []
    for _ in range(lines):
        word, sentence = int(rng.integers(WORDS)), []
        for _ in range(int(rng.integers(5, 25))):
            sentence.append(f"w{word}")
            word = int(rng.choice(followers[word]))
        text.append(" ".join(sentence))
    return text


def write_lines(path: Path, lines: int, seed: int) -> Path:
    """``make_lines`` in a file."""
    path.write_text("".join(f"{line}\n" for line in make_lines(lines, seed)))
    return path


def make_data(folder: Path, **splits: list[str]) -> Path:
    """What fairseq-preprocess would make of these lines, with ``make_dictionary``."""
    dictionary = make_dictionary()
    folder.mkdir(parents=True, exist_ok=True)
    dictionary.save(str(folder / "dict.txt"))
    for split, lines in splits.items():
        builder = make_builder(str(folder / f"{split}.bin"), "mmap", vocab_size=len(dictionary))
        for line in lines:
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False).long())
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


def make_model(data: Path, path: Path, *flags: str, dim: int = 32, seed: int = 1) -> Path:
    """A checkpoint of an untrained adaptive-input Transformer LM, as fairseq-train would write it."""
    arguments = [
        str(data), "--task", "language_modeling", "--arch", "transformer_lm", "--decoder-layers", "2",
        "--decoder-embed-dim", str(dim), "--decoder-input-dim", str(dim), "--decoder-output-dim", str(dim),
        "--decoder-ffn-embed-dim", str(2 * dim), "--decoder-attention-heads", "2", "--decoder-normalize-before",
        "--tokens-per-sample", "64", "--optimizer", "adam", *(flags or ADAPTIVE),
    ]  # fmt: skip
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(seed)
    model = task.build_model(cfg.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 0}],
            "task_state": {},
            "extra_state": {"train_iterator": {"epoch": 1}},
        },
        path,
    )
    return path
