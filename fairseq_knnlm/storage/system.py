"""The calls that put bytes on a disk, in one place, so that a test can let any of them fail."""

import os
from pathlib import Path


def write(descriptor: int, data: memoryview) -> None:
    """Write all of ``data``; the system may take it in several pieces."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """As ``write``, at a place of the file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    os.replace(old, new)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable: without this a crash of the machine may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)
