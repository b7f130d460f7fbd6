"""Looks at the finished site: python tools/check_site.py build/site

Fails if a page loads anything from another server, or if a file that a page loads or links to is not there.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href")}  # what a browser fetches by itself
NOT_FETCHED = {"canonical", "next", "prev", "edit"}  # relations of a <link> that are only for reading


class PageReader(HTMLParser):
    """Collects what a page loads, and what it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        for name, value in attributes:
            if value and (tag, name) in LOADS and values.get("rel") not in NOT_FETCHED:
                self.loads.append(value)
            elif value and (tag, name) == ("a", "href"):
                self.links.append(value)


def problems(page: Path) -> list[str]:
    """What is wrong with a page."""
    reader = PageReader()
    reader.feed(page.read_text(encoding="utf-8"))
    found = []
    for address in reader.loads + reader.links:
        parts = urlsplit(address)
        elsewhere = bool(parts.scheme or parts.netloc)
        if elsewhere and address in reader.loads and parts.scheme != "data":
            found.append(f"loads {address} from another server")
        if not elsewhere and parts.path and not parts.path.startswith("/"):
            target = page.parent / unquote(parts.path)
            if not (target.is_file() or (target / "index.html").is_file()):
                found.append(f"{address} is not there")
    return found


def main() -> int:
    site = Path(sys.argv[1])
    pages = sorted(site.rglob("*.html"))
    found = [f"{page.relative_to(site)}: {problem}" for page in pages for problem in problems(page)]
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not pages:
        print(f"error: there are no pages in {site}; run make docs", file=sys.stderr)
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
