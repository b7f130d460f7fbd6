"""Running a model, or several as one, over batches: on a CPU one batch per thread."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from ..parallel import for_each
from ..products import fast_linear_layers


class Model(Protocol):
    """What is used of a language model of fairseq, which has no types of its own."""

    decoder: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def eval(self) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def max_positions(self) -> int | None: ...

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Tensor: ...


class Ensemble:
    """Several models as one LM (``--path a.pt:b.pt``): each runs on every batch, and the LM is the mean of all.

    It averages probabilities, as fairseq's own scorer does. It has no states of its own: keys are those of one member,
    so each memory listens to that member alone.
    """

    def __init__(self, members: list[Model]):
        self.members = members
        self.decoder = members[0].decoder  # for what all members have in common: the dictionary

    def eval(self) -> None:
        for member in self.members:
            member.eval()

    def parameters(self) -> Iterator[nn.Parameter]:
        for member in self.members:
            yield from member.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With the number of the member in front, so that the fingerprint of an ensemble is that of all of them."""
        for number, member in enumerate(self.members):
            for name, parameter in member.named_parameters():
                yield f"{number}.{name}", parameter

    def max_positions(self) -> int | None:
        limits = [limit for limit in (member.max_positions() for member in self.members) if limit is not None]
        return min(limits, default=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the members of an ensemble run one by one")

    def get_normalized_probs(self, net_output: Any, log_probs: bool, sample: Any = None) -> Any:
        raise RuntimeError("the members of an ensemble have probabilities of their own")


def join(models: list[Model]) -> Model:
    """The only model, or all of them as one."""
    return models[0] if len(models) == 1 else Ensemble(models)


def members_of(model: Model) -> list[Model]:
    """The models of an ensemble; of any other model itself."""
    return model.members if isinstance(model, Ensemble) else [model]


def for_each_batch(model: Model, function: Callable[[dict], Any], batches: list[dict]) -> list:
    """The results of function(batch), which runs the model, in order; without gradients.

    A model of fairseq on a CPU runs on one batch per thread, which is a third faster than all threads on one batch.
    """
    with fast_linear_layers:
        return _for_each_batch(model, function, batches)


def _for_each_batch(model: Model, function: Callable[[dict], Any], batches: list[dict]) -> list:
    if len(batches) > 1 and batches[0].get("in_lanes") and _on_cpu(model):
        return _for_each_in_lanes(function, batches)
    if not runs_in_threads(model) or len(batches) == 1:
        return [function(batch) for batch in batches]

    def run(batch: dict) -> Any:
        with torch.no_grad():  # a setting of each thread, so every thread needs it
            return function(batch)

    # The model's mask and positions grow when a batch is longer than any before: so the longest comes first, alone.
    lengths = [batch["net_input"]["src_tokens"].size(1) for batch in batches]
    longest = lengths.index(max(lengths))
    first = run(batches[longest])
    results = for_each(run, [(batch,) for number, batch in enumerate(batches) if number != longest])
    return [*results[:longest], first, *results[longest:]]


def _for_each_in_lanes(function: Callable[[dict], Any], batches: list[dict]) -> list:
    """As ``for_each_batch``, for a model with a memory of each text: one thread per text, whose batches stay in order.

    Two threads for each product of a small network can be many times slower than one: they wait for each other.
    """
    texts: dict[str, list[dict]] = {}
    for batch in batches:
        texts.setdefault(batch["net_input"]["text"], []).append(batch)

    def run(own: list[dict]) -> list:
        with torch.no_grad():
            return [function(batch) for batch in own]

    jobs = [(own,) for own in texts.values()]
    if len(jobs) == 1:  # for_each would leave it to torch's threads
        jobs.append(([],))
    return [result for results in for_each(run, jobs) for result in results]


def _on_cpu(model: Model) -> bool:
    return next(model.parameters()).device.type == "cpu"


def runs_in_threads(model: Model) -> bool:
    """Whether batches can go through a model at the same time, and are faster then."""
    return _on_cpu(model) and all(keeps_nothing(getattr(member, "decoder", None)) for member in members_of(model))


def keeps_nothing(decoder: Any) -> bool:
    """Whether a decoder keeps nothing from one batch to the next: fairseq's own do not, another has to say so."""
    return isinstance(decoder, TransformerDecoderBase) or getattr(decoder, "keeps_nothing", False)
