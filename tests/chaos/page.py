"""The page that says what was tried, written by the command that tried it."""

from pathlib import Path

from fairseq_knnlm.report.tables import table
from fairseq_knnlm.storage import write_text

# ruff: noqa: E501  lines of a table cannot be broken
INTRODUCTION = """# Reliability

Everything that fairseq-knnlm writes goes through one writer: a temporary name, write, fsync, rename, fsync of the
folder. One process at a time works on a thing; the others wait for it or are told who is at work, by a lock that the
kernel frees when its holder dies. Each record and each array has a checksum.

`make chaos` disturbs every command that writes, and wrote the table below. A loss would be a changed or missing byte
after the next run of the same command, a traceback, or a wrong number that `knnlm verify` does not find.

| disturbance | what happens | what must follow |
|---|---|---|
| kill | SIGKILL at a random moment, up to three times in a row | the same command ends byte for byte as an undisturbed run |
| together | two and three processes at once | each succeeds or says which process is at work; the result is that of one |
| write faults | the n-th write, fsync or rename fails with ENOSPC, EIO and EDQUOT, for every n | one sentence, the old data whole, the next run succeeds |
| bad bytes | a file of a datastore, index, save or table is flipped, truncated, emptied or replaced | a sentence or a finding of `knnlm verify`, never a crash |
| bad input | wrong flags, files and folders | one sentence, a non-zero exit code, no file changed |
| server | slow senders, half requests, many requests at once, hostile input | others are answered meanwhile; Ctrl-C ends it cleanly |

"""

LIMITS = """
## Locks

A lock is `flock` on a small file beside the thing that is written. Where a file system has no locks (some Lustre
mounts), commands that write say so; `KNNLM_NO_LOCKS=1` turns the locks off, and then it is up to you that no two
processes work on one folder at once.

## Checking what you have

`knnlm verify DIR` compares a datastore (or a save, or a table of neighbours) with its checksums, and each index with
the keys: every entry in exactly one inverted list, its code that of its key, its list the one that its key is nearest
to. Of an index with more than a million entries a sample of the lists is compared; `--all` compares every one.
"""


def write_page(path: Path, rows: list[list[str]]) -> None:
    """Write the page with the counts of this run."""
    counts = table(["disturbance", "of", "count", "losses"], rows, markdown=True)
    write_text(path, f"{INTRODUCTION}## Counts\n\n{counts}\n{LIMITS}")
