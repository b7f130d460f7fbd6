"""One self-contained HTML page: style, script and data inside, nothing fetched."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from ..storage.writer import plain


def build_page(data: dict[str, Any] | None, live: bool = False) -> str:
    """The page for this data, or with ``live`` one that asks its server for it."""
    parts = files(__package__)
    style, script, page = (parts.joinpath(name).read_text() for name in ("page.css", "page.js", "page.html"))
    # A script that came in with the text could not run: only these two have the right hashes.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    policy += "; connect-src 'self'" if live else ""
    for name, content in (
        ("POLICY", policy),
        ("STYLE", style),
        ("LIVE", "true" if live else "false"),
        ("SCRIPT", script),
        ("DATA", embed(data)),  # last, so that nothing in it is taken for one of the others
    ):
        page = page.replace(f"@@{name}@@", content, 1)
    return page


def embed(data: Any) -> str:
    """JSON that may stand inside a script element, whatever text it holds."""
    text = json.dumps(plain(data), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
