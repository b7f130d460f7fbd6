"""Where the six keys are in the layers of each family of decoders: one table, and nothing else knows of it.

A decoder says which family it is of by ``key_family``; fairseq's own decoders, which say nothing, are of ``fairseq``.
To add an architecture of Hugging Face, add a line to ``HUGGING_FACE`` (its ``model_type`` and its family), and if its
layers are built in another way, a family.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import KnnlmError


class KeySource(NamedTuple):
    """Where a key is captured: a submodule of the decoder layer ("" is the layer), and its input or its output."""

    module: str
    side: str
    normalise: bool = False  # apply the decoder's final norm to what was captured


def _pre_norm(attention_norm: str, ffn_norm: str) -> dict[str, KeySource]:
    """The six states of Table 5 of Khandelwal et al. (2020), for a layer with a norm before each of its two parts."""
    return {
        "ffn_input_ln": KeySource(ffn_norm, "output"),
        "ffn_input": KeySource(ffn_norm, "input"),
        "attn_input_ln": KeySource(attention_norm, "output"),
        "attn_input": KeySource(attention_norm, "input"),
        "output_ln": KeySource("", "output", normalise=True),
        "output": KeySource("", "output"),
    }


@dataclass(frozen=True)
class Family:
    """How the layers of some decoders are built."""

    keys: dict[str, KeySource]
    layers: str = "layers"  # path of the list of layers: in fairseq's decoder, or in the model of Hugging Face
    final_norm: str = "layer_norm"  # path of the norm after the last layer; None there: there is none
    pre_norm: str | None = None  # the attribute of a layer that must be true; None: the family has no others
    rms: bool = False  # norms divide by the root mean square and subtract no mean: so does the one that stands in
    flat: bool = False  # the layer joins batch and positions before its second norm


FAMILIES: dict[str, Family] = {
    "fairseq": Family(_pre_norm("self_attn_layer_norm", "final_layer_norm"), pre_norm="normalize_before"),
    "gpt2": Family(_pre_norm("ln_1", "ln_2"), "transformer.h", "transformer.ln_f"),
    # With parallel residuals (all Pythia models) both parts of a layer read the same state, and are added together: so
    # ffn_input is attn_input, and ffn_input_ln, the same under another norm, has not seen this layer's attention.
    "gpt_neox": Family(
        _pre_norm("input_layernorm", "post_attention_layernorm"), "gpt_neox.layers", "gpt_neox.final_layer_norm",
    ),
    "opt": Family(
        _pre_norm("self_attn_layer_norm", "final_layer_norm"), "model.decoder.layers", "model.decoder.final_layer_norm",
        pre_norm="do_layer_norm_before", flat=True,
    ),
    # An RMS norm keeps the mean of a state, so the keys after it lie around that and not around zero.
    "llama": Family(
        _pre_norm("input_layernorm", "post_attention_layernorm"), "model.layers", "model.norm", rms=True,
    ),
}  # fmt: skip

# The model_type in config.json -> the family.
HUGGING_FACE = {
    "gpt2": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "gpt_neox",
    "opt": "opt",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "smollm3": "llama",
}

KEYS = tuple(FAMILIES["fairseq"].keys)
DEFAULT_KEY = "ffn_input_ln"


def family_of(decoder: Any) -> Family:
    """The family that a decoder is of."""
    return FAMILIES[getattr(decoder, "key_family", "fairseq")]


def hugging_face_family(model_type: str) -> str:
    """The name of the family of an architecture of Hugging Face."""
    if model_type not in HUGGING_FACE:
        raise KnnlmError(
            f"the architecture {model_type} is not one whose keys are known ({', '.join(HUGGING_FACE)}); add it to the "
            "table HUGGING_FACE in fairseq_knnlm/keys/families.py"
        )
    return HUGGING_FACE[model_type]
