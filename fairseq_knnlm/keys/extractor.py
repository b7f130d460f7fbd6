"""The hook that captures the hidden state that is the key; families.py has the table of where each key is."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KnnlmError
from .families import family_of
from .running import Model, keeps_nothing


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
    family = family_of(model.decoder)
    norms = {source.module for source in family.keys.values()} - {""}
    for layer in layers:
        if not all(hasattr(layer, norm) for norm in norms):
            raise KnnlmError(
                f"layers of type {type(layer).__name__} have no layer norms to take keys from; "
                "use a transformer_lm checkpoint"
            )
        if family.pre_norm and not getattr(layer, family.pre_norm):
            raise KnnlmError(
                "this is a post-norm model, where the key names would mean other states; "
                "use a checkpoint trained with --decoder-normalize-before, or another model of Hugging Face"
            )


class _Captured(Exception):
    """Ends a forward pass of which nothing more is needed."""


class _Pass(threading.local):
    """The forward pass that a thread is in: batches may go through the model at the same time."""

    captured: Tensor | None = None
    shape: torch.Size | None = None  # of the states that enter the layer, where it changes it inside
    stop = False  # as soon as the key is captured


class KeyExtractor:
    """Captures one hidden state of every forward pass by a hook; the model's code is not touched.

    Usage, in one thread: run the model, then ``keys = extractor.pop()``; or, for keys alone,
    ``keys = extractor.run(model, inputs)``.
    """

    def __init__(self, model: Model, key: str, layer: int):
        check_model(model)
        self.model = model
        decoder = model.decoder
        family = family_of(decoder)
        source = family.keys[key]
        self._time_first = not getattr(decoder, "batch_first", False)
        self._pass = _Pass()
        self._may_stop = keeps_nothing(decoder)  # another decoder may have a memory to update at the end
        self._finish: Callable[[Tensor], Tensor] = lambda state: state
        if source.normalise:
            # The decoder's own norm was trained on the last layer only. Where it does not apply (as in
            # transformer_lm_wiki103, which has none), a parameter-free norm of the same kind stands in.
            last = layer == len(decoder.layers) - 1
            plain = F.rms_norm if family.rms else F.layer_norm
            if last and decoder.layer_norm is not None:
                self._finish = decoder.layer_norm
            else:
                self._finish = lambda state: plain(state, state.shape[-1:])
        module = decoder.layers[layer]
        self._handles = []
        if family.flat:
            self._handles.append(module.register_forward_pre_hook(lambda _, inputs: self._remember_shape(inputs[0])))
        if source.module:
            module = getattr(module, source.module)
        if source.side == "input":
            self._handles.append(module.register_forward_pre_hook(lambda _, inputs: self._capture(inputs)))
        else:
            self._handles.append(module.register_forward_hook(lambda _, __, output: self._capture(output)))

    def _remember_shape(self, state: Tensor) -> None:
        self._pass.shape = state.shape

    def _capture(self, state: Tensor | tuple[Tensor, ...]) -> None:
        # A decoder layer returns a tuple, a pre-hook receives one; in both the state comes first.
        state = state[0] if isinstance(state, tuple) else state
        self._pass.captured = state if self._pass.shape is None else state.view(self._pass.shape)
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
        for handle in self._handles:
            handle.remove()


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
