"""What identifies a dictionary."""

import hashlib
from typing import Any

from fairseq.data import Dictionary


def dictionary_facts(dictionary: Dictionary) -> dict[str, Any]:
    """Its symbols in order (counts may differ), as a checksum, and how many there are."""
    symbols = "\n".join(dictionary.symbols)
    return {
        "dictionary_sha256": hashlib.sha256(symbols.encode()).hexdigest(),
        "dictionary_size": len(dictionary),
    }
