"""Texts to begin with on the live page: some lines of the data that the model was not trained on."""

from pathlib import Path

from fairseq.data import Dictionary, data_utils

from ..data.text_encoding import TextForm

EXAMPLES = 5
TOKENS = (30, 150)  # of an example: enough to see something, and read at a glance


def example_texts(data: str | Path, dictionary: Dictionary, text: TextForm) -> list[str]:
    """Some short stretches of the valid or test split, from all over it; none if neither is there."""
    for split in ("valid", "test"):
        lines = data_utils.load_indexed_dataset(str(Path(data) / split), dictionary)
        if lines is not None and len(lines):
            starts = [place * len(lines) // EXAMPLES for place in range(EXAMPLES)]
            found = [_text_from(lines, start, dictionary, text) for start in starts]
            return list(dict.fromkeys(example for example in found if example))
    return []


def _text_from(lines, start: int, dictionary: Dictionary, text: TextForm) -> str:  # type: ignore[no-untyped-def]
    """Whole lines from ``start`` on, until they are enough; a long line is cut."""
    fewest, most = TOKENS
    texts: list[str] = []
    total = 0
    for number in range(start, len(lines)):
        if total >= fewest:
            break
        tokens = lines[number][: most - total]
        total += len(tokens)
        # The end of the line is left out, and an unknown word keeps the form that encodes to it again.
        words = text.passage([token for token in tokens.tolist() if token != dictionary.eos()])
        texts.append(words.removesuffix("\n"))
    return "\n".join(line for line in texts if line.strip())
