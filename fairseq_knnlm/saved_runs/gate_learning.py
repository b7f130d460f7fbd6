"""From a saved run to a gate: settings, training, the lists worth a visit, and the table that is printed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import KnnlmError
from ..mixture.gate import Gate, GateFacts
from ..mixture.interpolation import perplexity
from .gate_data import GateData, gate_memories, load_data
from .gate_training import constant_gate, split_rows, train_gate
from .scores import SavedScores
from .settings import Settings
from .skipping import learn_skipping
from .tuning import tune

FEWEST_TOKENS = 1000
SOURCE = ("split", "data_sha256", "dictionary_sha256", "checkpoint_sha256")


@dataclass
class GateResult:
    """A gate and what it is worth."""

    gate: Gate
    settings: Settings
    perplexities: dict[str, dict[str, float]]  # text -> what -> perplexity; and tokens

    HEADER: ClassVar = ("LM", "constant", "gate", "oracle")

    def rows(self) -> list[list[str]]:
        """Of the table."""
        return [
            [text, f"{values['tokens']:,}", *(f"{values[name.lower()]:.2f}" for name in self.HEADER)]
            for text, values in self.perplexities.items()
        ]

    def flags(self, path: str) -> str:
        """As fairseq-eval-lm takes them."""
        flags = [f"--knn-gate {path}"]
        for memory in self.gate.memories:
            if memory.name == "cache":
                flags.append(f"--knn-cache-size {memory.neighbors}")
        return " ".join(flags)

    def facts(self) -> dict[str, Any]:
        """For machines."""
        memories = [(memory.name, memory.weight, memory.sharpness) for memory in self.gate.memories]
        return {
            "results": self.perplexities,
            "features": self.gate.facts.features,
            "constants": {name: weight for name, weight, _ in memories},
            "sharpness": {name: sharpness for name, _, sharpness in memories},
            "neighbors": {memory.name: memory.neighbors for memory in self.gate.memories},
        }


def learn_gate(
    saved: SavedScores,
    report: SavedScores | None = None,
    seed: int = 1,
    told: Callable[[int, float], None] | None = None,
) -> GateResult:
    """Tune the temperatures and constant weights, then train a gate that begins as these.

    Args:
        report: other text, which nothing is learnt from
        told: is told of each epoch
    """
    if len(saved) < FEWEST_TOKENS:
        raise KnnlmError(f"a gate needs {FEWEST_TOKENS:,} tokens at least, not {len(saved):,}; score more text")
    for each in (saved, report) if report else (saved,):
        each.lm_features  # noqa: B018  refuses saves of older releases before anything takes long
    settings = tune(saved)
    data = load_data(saved, settings)
    source = {name: saved.run.source.get(name) for name in SOURCE}
    ranges = [[part.run.start, part.run.stop] for part in saved.parts]
    facts = GateFacts({**source, "tokens": ranges}, gate_memories(saved, settings), [], [], [], [])
    gate = train_gate(data, facts, seed, told)
    parts = split_rows(len(data))
    results = {
        "trained on": _perplexities(data.rows(parts[0]), gate),
        "held out": _perplexities(data.rows(parts[2]), gate),
    }
    if report:
        results[f"{report.run.source['split']}, report"] = _perplexities(load_data(report, settings, data.names), gate)
    gate.facts.results = results
    gate.facts.skip = learn_skipping(saved, data, gate.facts)
    return GateResult(gate, settings, results)


def _perplexities(data: GateData, gate: Gate) -> dict[str, float]:
    places = [data.names.index(name) for name in gate.facts.features]
    weights = gate.log_weights_of(data.features[:, places], data.missing)
    constants = constant_gate(gate.facts).log_weights_of(data.features[:, :0], data.missing)
    return {
        "tokens": len(data),
        "lm": perplexity(float(data.log_probs[:, 0].mean())),
        "constant": perplexity(-float(data.loss(constants))),
        "gate": perplexity(-float(data.loss(weights))),
        "oracle": perplexity(float(data.log_probs.amax(dim=1).mean())),
    }
