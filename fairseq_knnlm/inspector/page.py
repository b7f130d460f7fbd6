"""One self-contained HTML page: style, script and data inside, nothing fetched."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from ..storage.writer import plain

SCRIPTS = ("numbers.js", "charts.js", "page.js", "knobs.js", "live.js")  # parts of one program, in this order


def build_page(data: dict[str, Any] | None, live: bool = False, examples: Sequence[str] = ()) -> str:
    """The page for this data, or with ``live`` one that asks its server for it and offers these texts to begin with."""
    style, page, program = _read("page.css"), _read("page.html"), script()
    # A script that came in with the text could not run: only these two have the right hashes.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(program)}'; base-uri 'none'"
    policy += "; connect-src 'self'" if live else ""
    contents = {
        "POLICY": policy,
        "STYLE": style,
        "LIVE": "true" if live else "false",
        "EXAMPLES": embed(list(examples)),
        "SCRIPT": program,
        "DATA": embed(data),
    }
    # Cut at the marks of the page first, so that nothing in a content is taken for a mark.
    first, *pieces = page.split("@@")
    for name, text in zip(pieces[::2], pieces[1::2]):
        first += contents[name] + text
    return first


def script() -> str:
    """The page's program."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_read, SCRIPTS)) + "})();\n"


def embed(data: Any) -> str:
    """JSON that may stand inside a script element, whatever text it holds."""
    text = json.dumps(plain(data), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
