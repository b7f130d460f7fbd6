"""Training throughput of SPALM and of the Transformer-XL, in turns on the same batches.

    python -m benchmarks.spalm [--layers 4 --dim 128 ...]

A turn is forward, backward and optimizer step of one batch through one network, then through the other; so whatever
else the machine does slows both. The ratio is that of the medians. Tokens and neighbours are drawn by Zipf's law.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_knnlm.models.spalm_lm import SPALM, SPALMConfig, SPALMDecoder
from fairseq_knnlm.models.transformer_xl import TransformerXLConfig, TransformerXLDecoder, TransformerXLLanguageModel


def make_models(args, dictionary: Dictionary) -> dict[str, torch.nn.Module]:
    shared = {
        "layers": args.layers, "dim": args.dim, "heads": args.heads, "ffn_dim": args.ffn_dim,
        "memory_size": args.memory, "adaptive_cutoff": args.cutoffs or None, "dropout": 0.1,
    }  # fmt: skip
    xl, spalm = TransformerXLConfig(**shared), SPALMConfig(**shared, neighbors_used=args.neighbors)
    return {
        "Transformer-XL": TransformerXLLanguageModel(TransformerXLDecoder(xl, dictionary)),
        "SPALM": SPALM(SPALMDecoder(spalm, dictionary)),
    }


def make_batch(args, dictionary: Dictionary, step: int) -> dict:
    rng = np.random.default_rng(step)
    shape = (args.lanes, args.segment, 2 + args.neighbors)
    drawn = rng.zipf(1.2, shape) % (len(dictionary) - dictionary.nspecial) + dictionary.nspecial
    tokens = torch.from_numpy(drawn)
    net_input = {"src_tokens": tokens[:, :, 0], "text": "train", "step": step}
    return {"net_input": net_input, "target": tokens[:, :, 1], "neighbors": tokens[:, :, 2:]}


def train_step(model, optimizer, batch: dict, with_neighbors: bool) -> float:
    """Seconds of processor time, which other processes do not take part in."""
    started = time.process_time()
    extra = {"neighbors": batch["neighbors"]} if with_neighbors else {}
    output, _ = model(**batch["net_input"], **extra)
    if model.decoder.adaptive_softmax is None:
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["target"].flatten(), reduction="sum")
    else:
        logits, targets = model.decoder.adaptive_softmax(output, batch["target"].flatten())
        loss = sum(
            torch.nn.functional.cross_entropy(logit, target, reduction="sum")
            for logit, target in zip(logits, targets)
            if target is not None
        )
    (loss / batch["target"].numel()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "layers": 4, "dim": 128, "ffn-dim": 512, "heads": 4, "lanes": 16, "segment": 128, "memory": 128,
        "neighbors": 4, "vocabulary": 48916, "rounds": 20,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--cutoffs", default="4000,16000", help="of the adaptive softmax (default: %(default)s)")
    args = parser.parse_args()
    torch.manual_seed(1)
    dictionary = Dictionary()
    for number in range(args.vocabulary):
        dictionary.add_symbol(f"w{number}")
    models = make_models(args, dictionary)
    optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in tqdm(range(args.rounds + 2), desc="steps"):
        batch = make_batch(args, dictionary, step)
        names = list(models) if step % 2 else list(models)[::-1]
        for name in names:
            taken = train_step(models[name], optimizers[name], batch, name == "SPALM")
            if step >= 2:  # memory is full, everything is allocated
                seconds[name].append(taken)
    tokens = args.lanes * args.segment
    result = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, rate in result.items():
        print(f"{name}: {rate:,.0f} tokens per processor second")
    result["ratio"] = result["SPALM"] / result["Transformer-XL"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
