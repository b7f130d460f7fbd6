"""Small JSON files that describe a folder: format, version, a checksum of their own, and the types of their fields."""

import hashlib
import json
import logging
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import KnnlmError
from .faults import read_failure
from .writer import plain, write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

CHECKSUM = "checksum"
Record = TypeVar("Record", bound="DataclassInstance")


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a checksum of itself, so that a changed digit is noticed."""
    content = plain(content)
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_json(path: Path, remedy: str = "delete its folder and make it again") -> Any:
    """Read JSON. The remedy is for a damaged file; a file that cannot be read at all is another matter."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KnnlmError(f"{path} is damaged ({_one_line(error)}); {remedy}") from error
    except OSError as error:
        raise read_failure(error, path) from error


def read_record(path: Path, remedy: str = "delete its folder and make it again") -> dict[str, Any]:
    """Read what ``write_record`` wrote, or what a release before it wrote without a checksum."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise KnnlmError(f"{path} is damaged (it holds no fields); {remedy}")
    if not _matches(content):
        logger.warning(f"warning: {path} was edited or damaged after it was written: its checksum differs")
    content.pop(CHECKSUM, None)
    return content


def is_intact(path: Path) -> bool:
    """Whether a record is as it was written, as far as its checksum tells."""
    content = read_json(path)
    return isinstance(content, dict) and _matches(content)


def read_versioned(path: Path, format: str, versions: int | tuple[int, ...], remedy: str) -> dict[str, Any]:
    """Read the record of a folder, of one of these versions; ``format`` ends in what it is."""
    versions = versions if isinstance(versions, tuple) else (versions,)
    folder, what = path.parent, format.split()[-1]
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KnnlmError(f"{folder} is not a {what} (no {path.name}); {remedy}") from error
    except OSError as error:
        raise read_failure(error, path) from error
    content = read_record(path, f"delete {folder} and {remedy} again")
    if content.get("format") != format:
        raise KnnlmError(f"{path} does not describe a {what}; {remedy}")
    if content.get("version") not in versions:
        readable = " and ".join(map(str, versions))
        raise KnnlmError(
            f"{folder} has format version {content.get('version')}, but this fairseq-knnlm reads version {readable}; "
            f"{remedy} again, or use the release that wrote it"
        )
    return content


def from_record(cls: type[Record], content: dict[str, Any], path: Path, remedy: str) -> Record:
    """An object of the dataclass ``cls``, whose fields must be there and of the types that it declares."""
    hints = typing.get_type_hints(cls)
    names = {field.name for field in fields(cls)}
    try:
        if unknown := sorted(set(content) - names):
            raise TypeError(f"the field {unknown[0]} is unknown")
        for name, value in content.items():
            if not _fits(value, hints[name]):
                raise TypeError(f"the field {name} is {value!r:.60}")
        return cls(**content)
    except TypeError as error:
        raise KnnlmError(f"{path} is damaged ({_one_line(error)}); {remedy}") from error


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _matches(content: dict[str, Any]) -> bool:
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    return CHECKSUM not in content or content[CHECKSUM] == _checksum(rest)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
