"""Raw text as the model's data was made: with a tokenizer of fairseq and a dictionary, or in another way."""

import argparse
from collections.abc import Sequence
from typing import Any, Protocol

from fairseq.data import Dictionary
from fairseq.data.encoders import BPE_REGISTRY, TOKENIZER_REGISTRY
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES

from ..errors import KnnlmError
from ..near_matches import UNKNOWN_FLAGS, Parser, did_you_mean, with_near_matches

MISSING = "???"  # the default of a flag that has to be given, in the dataclasses of fairseq


class TextEncoder:
    """First the tokenizer, then the encoding; without both, text stays as it is."""

    def __init__(self, steps: Sequence[Any] = ()):
        """steps: the encoders of fairseq, in order."""
        self._steps = steps

    def encode(self, line: str) -> str:
        """The line as tokens of the dictionary between blanks."""
        for step in self._steps:
            line = step.encode(line)
        return line

    def decode(self, tokens: Sequence[str]) -> list[str]:
        """The words that such tokens stand for."""
        text = " ".join(tokens)
        for step in reversed(self._steps):
            text = step.decode(text)
        return text.split()


class TextForm(Protocol):
    """From raw text to tokens of a model, and back."""

    end: int  # the token at which generation stops
    has_own_tokenizer: bool  # so that no other may be given, and perplexities per word are worth knowing

    def encode(self, line: str) -> list[int]:
        """A line, its end included."""

    def prompt(self, text: str) -> list[int]:
        """A text that goes on: without an end."""

    def sequences(self, text: str) -> list[list[int]]:
        """What of a text is read at once, each with an end."""

    def continued(self, text: str, tokens: Sequence[int]) -> str:
        """A text with the tokens that were generated after it."""

    def show(self, token: int) -> str:
        """One token, for a person."""

    def passage(self, tokens: Sequence[int]) -> str:
        """Some tokens of a text, for a person."""


class DictionaryText:
    """Text whose tokens, after the encoder, are words of a dictionary between blanks; every line stands alone."""

    has_own_tokenizer = False

    def __init__(self, dictionary: Dictionary, encoder: TextEncoder | None = None):
        self._dictionary, self._encoder = dictionary, encoder or TextEncoder()
        self.end = dictionary.eos()

    def encode(self, line: str) -> list[int]:
        return self._dictionary.encode_line(self._encoder.encode(line), add_if_not_exist=False).tolist()

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)[:-1]

    def sequences(self, text: str) -> list[list[int]]:
        return [self.encode(line) for line in text.splitlines() if line.strip()]

    def continued(self, text: str, tokens: Sequence[int]) -> str:
        words = self._encoder.decode([self._dictionary[token] for token in tokens if token != self.end])
        return f"{text.rstrip()} {' '.join(words)}".strip()

    def show(self, token: int) -> str:
        return self._dictionary[token]

    def passage(self, tokens: Sequence[int]) -> str:
        return " ".join(self._dictionary[token] for token in tokens)


def make_text_encoder(
    tokenizer: str | None, bpe: str | None, flags: Sequence[str] = (), lang: str = "en"
) -> TextEncoder:
    """The encoder of these names, with the flags that ``fairseq-interactive`` has for them.

    Args:
        flags: as a user types them, ``--sentencepiece-model FILE``
        lang: of the tokenizer ``moses``
    """
    parser = Parser(prog="knnlm", usage="knnlm ... [--tokenizer NAME] [--bpe NAME] and their flags", add_help=False)
    steps = [("tokenizer", tokenizer, TOKENIZER_REGISTRY), ("bpe", bpe, BPE_REGISTRY)]
    for kind, name, known in steps:
        if name is None:
            continue
        if name not in known:
            names = ", ".join(sorted(known))
            raise KnnlmError(f"fairseq has no {kind} {name}; choose one of {names}{did_you_mean(name, known)}")
        dataclass = REGISTRIES[kind]["dataclass_registry"].get(name)
        if dataclass is not None:
            gen_parser_from_dataclass(parser, dataclass())
    # Data for language models is not written in HTML, so &apos; would be an unknown word.
    parser.set_defaults(source_lang=lang, target_lang=lang, moses_no_escape=True)
    args, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise KnnlmError(with_near_matches(f"{UNKNOWN_FLAGS}{' '.join(unknown)}", parser))
    for name, value in vars(args).items():
        if value == MISSING:
            raise KnnlmError(f"--bpe {bpe} needs --{name.replace('_', '-')}; give it as for fairseq-interactive")
    return TextEncoder([_build(kind, name, known[name], args) for kind, name, known in steps if name is not None])


def _build(kind: str, name: str, make: Any, args: argparse.Namespace) -> Any:
    try:
        return make(args)
    except Exception as error:  # a package or a file that is missing, each in its own words
        why = " ".join(str(error).split())
        raise KnnlmError(f"--{kind} {name} does not work: {why:.300}") from error
