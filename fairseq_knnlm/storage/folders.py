"""Folders that are finished under another name and then appear as a whole."""

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from ..errors import KnnlmError
from . import system
from .faults import write_failure
from .writer import TEMPORARY

logger = logging.getLogger(__name__)


def publish_folder(work: Path, folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Give the finished folder ``work`` its name. A folder of that name goes aside first and is removed last.

    Args:
        is_ours: whether a file of this name may be removed from the old folder
    """
    aside = folder.with_name(f"{folder.name}.old-{secrets.token_hex(6)}")
    replaces = folder.exists()
    try:
        if replaces:
            system.rename(folder, aside)
        try:
            system.rename(work, folder)
        except OSError:
            if replaces:
                aside.rename(folder)
            raise
        system.fsync_folder(folder.parent)
    except OSError as error:
        raise write_failure(error, folder) from error
    if replaces:
        remove_own_files(aside, is_ours)


def recover_folder(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Finish what a process that was killed in ``publish_folder`` had begun. The caller holds the folder's lock."""
    for aside in sorted(folder.parent.glob(f"{folder.name}.old-*")):
        if folder.exists():
            remove_own_files(aside, is_ours)
        else:
            aside.rename(folder)


def remove_own_files(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove a folder that we made. If it holds a file that we did not make, only our files go, and that is said."""
    foreign = False
    for path in folder.iterdir():
        if path.is_file() and (is_ours(path.name) or TEMPORARY.fullmatch(path.name)):
            path.unlink(missing_ok=True)
        else:
            foreign = True
    if foreign:
        logger.warning(f"{folder} holds files that fairseq-knnlm did not write; they stay there")
    else:
        folder.rmdir()


def clear_work_folder(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Empty the work folder that a killed process left. Refuses if somebody else keeps files there."""
    foreign = [path for path in folder.iterdir() if not (is_ours(path.name) or TEMPORARY.fullmatch(path.name))]
    if foreign:
        raise KnnlmError(f"{foreign[0]} is in the way and was not written by fairseq-knnlm; move it elsewhere")
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
