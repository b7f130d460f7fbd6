"""Files and folders that are whole or not there: one writer, locks, records, and what a disk can hold.

Every file that this package writes goes through ``OutputFile``: a temporary name, write, fsync, rename, fsync of the
folder. So a killed process or a full disk leaves what was there before, and never half a file.
"""

from .arrays import ShardedArray, check_array_file
from .disk import check_disk_space, file_sha256, human_bytes, make_folder, read_ahead
from .folders import publish_folder, recover_folder, remove_own_files
from .locks import Lock
from .records import from_record, is_intact, read_json, read_versioned, write_record
from .writer import OutputFile, remove_stale_files, to_json, write_array, write_json, write_text

__all__ = [
    "Lock",
    "OutputFile",
    "ShardedArray",
    "check_array_file",
    "check_disk_space",
    "file_sha256",
    "from_record",
    "human_bytes",
    "is_intact",
    "make_folder",
    "publish_folder",
    "read_ahead",
    "read_json",
    "read_versioned",
    "recover_folder",
    "remove_own_files",
    "remove_stale_files",
    "to_json",
    "write_array",
    "write_json",
    "write_record",
    "write_text",
]
