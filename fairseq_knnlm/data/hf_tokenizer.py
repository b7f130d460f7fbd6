"""The tokenizer of a Hugging Face model: its ids as a fairseq dictionary, and raw text as its tokens.

Token i of the tokenizer is token i + 4 of the dictionary, behind fairseq's four special symbols. Of these, none is ever
predicted, and one has a meaning as input: ``</s>``, with which fairseq begins every text, is the tokenizer's own first
token (see ``start``). The ends of lines are tokens like all others, as the tokenizer makes them.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fairseq.data import Dictionary

from ..errors import KnnlmError

OFFSET = 4  # <s>, <pad>, </s>, <unk>
NO_TRANSFORMERS = "transformers is missing; run pip install 'fairseq-knnlm[hf]'"


def import_transformers() -> ModuleType:
    """transformers, quiet, or the sentence that says how to get it.

    It imports torchaudio where that is installed, as it is with fairseq, and fails where that was built for another
    torch. A module that is None in sys.modules is one that Python holds to be absent.
    """
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):
        sys.modules["torchaudio"] = None  # type: ignore[assignment]
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise KnnlmError(NO_TRANSFORMERS) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class HFTokenizer:
    """Reads and writes text in tokens of the dictionary; see ``TextForm``."""

    has_own_tokenizer = True

    def __init__(self, tokenizer: Any, vocabulary_size: int, where: str):
        """
        Args:
            tokenizer: of transformers, with a fast backend
            vocabulary_size: of the model, which may have more rows than the tokenizer has tokens
            where: its folder, for messages
        """
        self._tokenizer, self._size = tokenizer, vocabulary_size
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        if len(tokenizer) > vocabulary_size:
            raise KnnlmError(
                f"the tokenizer in {where} has {len(tokenizer):,} tokens but the model {vocabulary_size:,}; they do "
                "not belong together, so give the folder of one model"
            )
        self.start = self._first_token(where)
        eos = tokenizer.eos_token_id
        self.end = OFFSET + (self.start if eos is None else eos)

    @classmethod
    def load(cls, folder: str | Path, gguf: str | None, vocabulary_size: int) -> "HFTokenizer":
        """From the user's disk, where tokenizer.json is, or the GGUF file that holds one."""
        folder = Path(folder)
        if gguf is None and not (folder / "tokenizer.json").is_file():
            raise KnnlmError(
                f"{folder} has no tokenizer.json; put the model's tokenizer there (save_pretrained of a fast tokenizer "
                "writes it)"
            )
        transformers = import_transformers()
        options = {} if gguf is None else {"gguf_file": gguf}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        except Exception as error:  # transformers raises nearly anything for a file that is something else
            raise KnnlmError(f"the tokenizer in {folder} cannot be read ({one_line(error)}); save it again") from error
        if not getattr(tokenizer, "is_fast", False):
            raise KnnlmError(f"the tokenizer in {folder} has no fast form; save it as tokenizer.json")
        return cls(tokenizer, vocabulary_size, str(folder))

    def _first_token(self, where: str) -> int:
        """What a text begins with: the token that the tokenizer puts there, else its bos, else its eos."""
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self._tokenizer("a")["input_ids"]
        if len(whole) > len(bare) and whole[0] != bare[0]:
            return whole[0]
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id):
            if token is not None:
                return token
        raise KnnlmError(f"the tokenizer in {where} has neither a bos nor an eos token; add one to its configuration")

    def dictionary(self) -> Dictionary:
        """The tokens in the order of their ids; names that fairseq could not read back are written in another way."""
        dictionary = Dictionary()
        names = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        for number in range(self._size):
            name = names[number] if number < len(names) else None
            symbol = re.sub(r"[\s\x00-\x1f\x7f-\xa0]", lambda found: f"<u{ord(found[0]):04x}>", name or "<unused>")
            if not name or symbol in dictionary.indices or symbol.startswith("#fairseq:"):
                symbol = f"{symbol}#{number}"
            dictionary.add_symbol(symbol)
        if len(dictionary) != OFFSET + self._size:
            raise KnnlmError("two tokens of the tokenizer have the same name; its vocabulary is damaged")
        return dictionary

    # --- text -------------------------------------------------------------------------------------------------------

    def ids(self, text: str) -> list[int]:
        """Tokens of the dictionary."""
        return [number + OFFSET for number in self.backend.encode(text, add_special_tokens=False).ids]

    def encode(self, line: str) -> list[int]:
        return self.ids(line.rstrip("\n") + "\n")

    def prompt(self, text: str) -> list[int]:
        return self.ids(text)

    def sequences(self, text: str) -> list[list[int]]:
        """All of it at once, as the model reads it: its lines follow each other."""
        return [self.encode(text)] if text.strip() else []

    def continued(self, text: str, tokens: Sequence[int]) -> str:
        # A tokenizer may drop the blank in front of what it decodes, so the last token of the text comes with it.
        before = self.ids(text)[-1:]
        return text + self.passage([*before, *tokens])[len(self.passage(before)) :]

    def show(self, token: int) -> str:
        return self.passage([token])

    def passage(self, tokens: Sequence[int]) -> str:
        numbers = [token - OFFSET for token in tokens if token >= OFFSET and token != self.end]
        return self._tokenizer.decode(numbers, clean_up_tokenization_spaces=False)

    def ends_of_lines(self) -> list[bool]:
        """Of each id: whether its text ends with a newline."""
        known = range(len(self._tokenizer))
        texts = self._tokenizer.batch_decode([[number] for number in known], clean_up_tokenization_spaces=False)
        return [text.endswith("\n") for text in texts] + [False] * (self._size - len(texts))


class DictionaryWords:
    """The tokenizer in the place of fairseq's byte-pair encoding: text <-> symbols of the dictionary between blanks."""

    def __init__(self, tokenizer: HFTokenizer, dictionary: Dictionary):
        self._tokenizer, self._dictionary = tokenizer, dictionary

    def encode(self, text: str) -> str:
        return " ".join(self._dictionary[token] for token in self._tokenizer.prompt(text))

    def decode(self, symbols: str) -> str:
        return self._tokenizer.passage([self._dictionary.index(symbol) for symbol in symbols.split()])


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
