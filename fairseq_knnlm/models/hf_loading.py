"""A folder of Hugging Face: what is in it, whether it is a causal LM that we know, and loading it from the disk."""

import hashlib
import io
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.hf_tokenizer import HFTokenizer, import_transformers, one_line
from ..errors import KnnlmError
from ..keys.families import FAMILIES, HUGGING_FACE, hugging_face_family
from ..storage import OutputFile, file_sha256

CONFIG = "config.json"
POINTER = "checkpoint.pt"
DTYPES = ("float32", "float16", "bfloat16")
CHANGES_WITH_LENGTH = ("dynamic", "longrope")  # rotary embeddings that keep the longest length they have seen
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the names of such classes end


@dataclass(frozen=True)
class HFFolder:
    """Where a model lies: a folder with config.json, tokenizer.json and *.safetensors, or a GGUF file in it."""

    folder: Path
    gguf: str | None = None

    @classmethod
    def at(cls, path: str | Path) -> "HFFolder | None":
        """The model at a path that a user gives, a folder or a .gguf file; None: it is something else."""
        path = Path(path)
        if path.suffix == ".gguf":
            return cls(path.parent, path.name)
        return cls(path) if (path / CONFIG).is_file() else None

    def check(self) -> None:
        """Refuse a folder that lacks something, before anything large is read."""
        if not self.folder.is_dir():
            raise KnnlmError(f"there is no folder {self.folder}; give one with {CONFIG} and *.safetensors")
        if self.gguf is not None:
            if not (self.folder / self.gguf).is_file():
                raise KnnlmError(f"{self.folder} has no {self.gguf}; give --gguf the name of a file in it")
            return
        if not (self.folder / CONFIG).is_file():
            raise KnnlmError(f"{self.folder} has no {CONFIG}; give the folder of a model of Hugging Face")
        if not self.weights():
            pickled = any(self.folder.glob("pytorch_model*.bin"))
            why = " but pickled weights, which could run code; convert them" if pickled else ""
            raise KnnlmError(
                f"{self.folder} has no *.safetensors{why}; save the model with save_pretrained of transformers"
            )

    def weights(self) -> list[Path]:
        return [self.folder / self.gguf] if self.gguf else sorted(self.folder.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """SHA-256 of the configuration, the tokenizer and the sizes of the weights, whose content datastores know."""
        digest = hashlib.sha256()
        for name in (CONFIG, "tokenizer.json"):
            if (self.folder / name).is_file():
                digest.update(file_sha256(self.folder / name).encode())
        for path in self.weights():
            digest.update(f"{path.name} {path.stat().st_size}".encode())
        return digest.hexdigest()

    @property
    def options(self) -> dict[str, Any]:
        """What transformers has to know to read it."""
        return {"local_files_only": True, **({"gguf_file": self.gguf} if self.gguf else {})}

    def config(self) -> Any:
        """The configuration, of an architecture that we know."""
        self.check()
        transformers = import_transformers()
        try:
            config = transformers.AutoConfig.from_pretrained(str(self.folder), **self.options)
        except Exception as error:  # transformers raises nearly anything for a file that is something else
            raise KnnlmError(f"{self.folder} cannot be read as a model ({one_line(error)})") from error
        names = config.architectures or []
        causal = any(name.endswith(CAUSAL) for name in names)
        if config.model_type not in HUGGING_FACE and names and not causal:
            raise KnnlmError(
                f"{self.folder} holds {names[0]}, which is no causal language model: it has no decoder that predicts "
                f"the next token; use one such as {', '.join(list(HUGGING_FACE)[:5])}"
            )
        hugging_face_family(config.model_type)  # refuses an unknown one
        return config

    def tokenizer(self, config: Any) -> HFTokenizer:
        return HFTokenizer.load(self.folder, self.gguf, config.vocab_size)

    def model(self, config: Any, dtype: str) -> nn.Module:
        """The model itself, with all of its weights."""
        if dtype not in DTYPES:
            raise KnnlmError(f"there is no dtype {dtype}; choose {', '.join(DTYPES)}")
        transformers = import_transformers()
        kind = {} if self.gguf else {"use_safetensors": True}
        try:
            # The bar of a GGUF file's tensors is one that transformers has no switch for.
            with redirect_stderr(io.StringIO()) if self.gguf else nullcontext():
                model, info = transformers.AutoModelForCausalLM.from_pretrained(
                    str(self.folder), config=config, dtype=getattr(torch, dtype), output_loading_info=True,
                    **self.options, **kind,
                )  # fmt: skip
        except Exception as error:
            raise KnnlmError(f"the weights in {self.folder} cannot be read ({one_line(error)})") from error
        if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers
            raise KnnlmError(
                f"the weights in {self.folder} lack {missing[0]} and {len(missing) - 1} more; get the whole model again"
            )
        model.eval()
        self._check_parts(model)
        return model

    @torch.no_grad()
    def _check_parts(self, model: Any) -> None:
        """Refuse what computes probabilities in another way than by its output layer from its last states."""
        tokens = torch.zeros(1, 2, dtype=torch.long)
        whole = model(tokens, use_cache=False).logits
        parts = model.get_output_embeddings()(model.base_model(tokens, use_cache=False).last_hidden_state)
        if whole.shape != parts.shape or not torch.allclose(whole, parts.to(whole), rtol=1e-3, atol=1e-4):
            raise KnnlmError(
                f"{type(model).__name__} changes its logits after the output layer, which is not supported; use "
                "another model"
            )


def module_at(model: nn.Module, path: str) -> Any:
    """A submodule by its dotted path."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name)
    return found


def layers_and_norm(model: Any) -> tuple[str, Any, Any]:
    """The family of a model of Hugging Face, its layers, and the norm after them."""
    name = hugging_face_family(model.config.model_type)
    return name, module_at(model, FAMILIES[name].layers), module_at(model, FAMILIES[name].final_norm)


def keeps_nothing(config: Any) -> bool:
    """Whether a forward pass leaves a model of Hugging Face as it was."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in CHANGES_WITH_LENGTH


def write_pointer(path: Path, place: HFFolder, dtype: str) -> None:
    """A checkpoint without weights, for ``--path``: it says where the model is."""
    model = {
        "_name": "hf_causal_lm", "model_dir": str(place.folder.resolve()), "gguf": place.gguf, "dtype": dtype,
        "fingerprint": place.fingerprint(),
    }  # fmt: skip
    content = {
        "args": None,
        "cfg": {"model": model, "task": {"_name": "language_modeling"}, "common": {}},
        "model": {},
        "optimizer_history": [{"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with OutputFile(path) as file:
        file.write(buffer.getvalue())
