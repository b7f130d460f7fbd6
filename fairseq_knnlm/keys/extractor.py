"""Which hidden state is the key: a table from its name to where it is captured, and the hook that captures it."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor

from ..errors import KnnlmError
from .running import Model


class KeySource(NamedTuple):
    """Where a key is captured: a submodule of the decoder layer ("" is the layer), and its input or its output."""

    module: str
    side: str
    normalise: bool = False  # apply the decoder's final layer norm to what was captured


# The six states of Table 5 of Khandelwal et al. (2020), for a pre-norm layer.
KEYS: dict[str, KeySource] = {
    "ffn_input_ln": KeySource("final_layer_norm", "output"),
    "ffn_input": KeySource("final_layer_norm", "input"),
    "attn_input_ln": KeySource("self_attn_layer_norm", "output"),
    "attn_input": KeySource("self_attn_layer_norm", "input"),
    "output_ln": KeySource("", "output", normalise=True),
    "output": KeySource("", "output"),
}
DEFAULT_KEY = "ffn_input_ln"


def resolve_layer(decoder: Any, layer: int | None) -> int:
    """The layer's number from the start; None is the last layer, negative numbers count from the end."""
    count = len(decoder.layers)
    layer = -1 if layer is None else layer
    if not -count <= layer < count:
        raise KnnlmError(f"--knn-layer {layer} does not exist: the model has {count} layers, so use 0 to {count - 1}")
    return layer % count


def check_model(model: Model) -> None:
    """Refuse models whose hidden states do not mean what the key names say."""
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    if not layers:
        raise KnnlmError(
            f"{type(model).__name__} has no decoder layers to take keys from; use a transformer_lm checkpoint"
        )
    for layer in layers:
        if not (hasattr(layer, "self_attn_layer_norm") and hasattr(layer, "final_layer_norm")):
            raise KnnlmError(
                f"layers of type {type(layer).__name__} have no layer norms to take keys from; "
                "use a transformer_lm checkpoint"
            )
        if not layer.normalize_before:
            raise KnnlmError(
                "this is a post-norm model, where the key names would mean other states; "
                "use a checkpoint trained with --decoder-normalize-before"
            )


class _Captured(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _Pass(threading.local):
    """The forward pass that a thread is in: batches may go through the model at the same time."""

    captured: Tensor | None = None
    stop = False  # as soon as the key is captured


class KeyExtractor:
    """Captures one hidden state of every forward pass by a hook; the model's code is not touched.

    Usage, in one thread: run the model, then ``keys = extractor.pop()``; or, for keys alone,
    ``keys = extractor.run(model, inputs)``.
    """

    def __init__(self, model: Model, key: str, layer: int):
        check_model(model)
        source = KEYS[key]
        decoder = model.decoder
        self._time_first = not getattr(decoder, "batch_first", False)
        self._pass = _Pass()
        # fairseq's own decoders compute states and nothing else; another may have a memory to update at the end.
        self._may_stop = isinstance(decoder, TransformerDecoderBase)
        self._finish: Callable[[Tensor], Tensor] = lambda state: state
        if source.normalise:
            # The decoder's own norm was trained on the last layer only. Where it does not apply (as in
            # transformer_lm_wiki103, which has none), a parameter-free norm stands in.
            last = layer == len(decoder.layers) - 1
            if last and decoder.layer_norm is not None:
                self._finish = decoder.layer_norm
            else:
                self._finish = lambda state: F.layer_norm(state, state.shape[-1:])
        module = decoder.layers[layer]
        if source.module:
            module = getattr(module, source.module)
        if source.side == "input":
            self._handle = module.register_forward_pre_hook(lambda _, inputs: self._capture(inputs))
        else:
            self._handle = module.register_forward_hook(lambda _, __, output: self._capture(output))

    def _capture(self, state: Tensor | tuple[Tensor, ...]) -> None:
        # A decoder layer returns a tuple, a pre-hook receives one; in both the state comes first.
        self._pass.captured = state[0] if isinstance(state, tuple) else state
        if self._pass.stop:
            raise _Captured

    def run(self, model: Model, inputs: dict) -> Tensor:
        """The keys of a forward pass that goes no further than they need, B x T x C.

        The default key comes before the last feed-forward layer, which is a good part of a small model.
        """
        self._pass.stop = self._may_stop
        try:
            model(**inputs, features_only=True)
        except _Captured:
            pass
        finally:
            self._pass.stop = False
        return self.pop()

    def pop(self) -> Tensor:
        """The states of the last forward pass, B x T x C (fairseq's own layers work on T x B x C)."""
        state, self._pass.captured = self._pass.captured, None
        if state is None:
            raise RuntimeError("pop() comes after a forward pass")
        state = self._finish(state)
        return state.transpose(0, 1) if self._time_first else state

    def peek(self) -> Tensor:
        """As ``pop``, and the states stay."""
        captured = self._pass.captured
        state = self.pop()
        self._pass.captured = captured
        return state

    def remove(self) -> None:
        self._handle.remove()


def key_dimension(model: Model) -> int:
    """All six states have the width of the decoder."""
    return model.decoder.embed_dim


@torch.no_grad()
def weights_fingerprint(model: Model) -> str:
    """SHA-256 of the parameters rounded to half precision, so that ``--fp16`` does not change it.

    The file's own hash would not do: it changes when the optimizer state is removed.
    """
    import hashlib

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu", torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()
