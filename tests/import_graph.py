"""The rooms of the package in the order of the data, and which imports which.

    python tests/import_graph.py             prints the rooms, their modules and lines, and the graph
"""

import ast
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "fairseq_knnlm"

# Data walks down this list; a room imports from rooms above it only. Modules without a folder are rooms of their own.
ROOMS = [
    "errors", "near_matches", "logs", "machine", "progress", "parallel", "products", "storage", "report",
    "keys", "datastore", "data", "index", "original", "search", "cluster", "heads", "pruning", "memory", "mixture",
    "saved_runs", "prototypes", "fairseq_setup", "models", "criterions", "tasks", "spalm", "api", "inspector", "cli",
]  # fmt: skip
WITHOUT_FAIRSEQ = (
    "errors", "near_matches", "logs", "machine", "progress", "parallel", "products", "storage", "report", "datastore",
    "index", "original", "search", "cluster", "heads", "pruning",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One import statement."""

    module: str  # that imports, as dotted path inside the package
    line: int
    imported: str  # dotted path: inside the package, or the name of another package

    @property
    def room(self) -> str:
        return self.module.split(".")[0]

    @property
    def from_room(self) -> str:
        return self.imported.split(".")[0]


def modules() -> dict[str, Path]:
    """Dotted path inside the package -> file; the package's own __init__ is left out, for it is the door to all."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts != ["__init__"]:
            files[".".join(parts)] = path
    return files


def imports(own: bool) -> list[Import]:
    """Every import of our own modules, or of other packages; those inside functions, too."""
    found = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = module.split(".")[: -node.level]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                if own:
                    found += [Import(module, node.lineno, ".".join([*folder, name])) for name in names]
            elif isinstance(node, ast.Import | ast.ImportFrom) and not own:
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                found += [Import(module, node.lineno, name or "") for name in names]
    return found


def wrong_way() -> list[Import]:
    """Imports from a later room."""
    order = {room: place for place, room in enumerate(ROOMS)}
    return [
        found
        for found in imports(own=True)
        if found.from_room in order and order[found.from_room] > order.get(found.room, -1)
    ]


def main() -> None:
    files = modules()
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for found in imports(own=True):
        if found.from_room in graph and found.from_room != found.room:
            graph[found.room].add(found.from_room)
    for room in ROOMS:
        own = [module for module in files if module.split(".")[0] == room]
        lines = {module: len(files[module].read_text().splitlines()) for module in own}
        below = ", ".join(other for other in ROOMS if other in graph[room])
        print(f"{room}: {sum(lines.values()):,} lines; imports {below or 'nothing of ours'}")
        for module, count in lines.items():
            if "." in module and not module.endswith("__init__"):
                print(f"    {module.split('.', 1)[1]}: {count}")
    total = [len(path.read_text().splitlines()) for path in files.values()]
    print(f"{len(total)} modules, {sum(total):,} lines, the longest {max(total)}")


if __name__ == "__main__":
    main()
