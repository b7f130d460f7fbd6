"""Character models: their loss in base 2 is bits per character."""

import re

from fairseq.data import Dictionary

# A character, a byte without a glyph of its own (see examples/enwik8), or what fairseq fills dictionaries up with.
CHARACTER = re.compile(r".|<0x[0-9A-F]{2}>|madeupword\d+")


def is_character_level(dictionary: Dictionary) -> bool:
    """Whether every token stands for one character (the end of a line for its newline)."""
    symbols = dictionary.symbols[dictionary.nspecial :]
    return bool(symbols) and all(CHARACTER.fullmatch(symbol) for symbol in symbols)
