"""``knnlm verify``: is a folder of ours what it was when it was written?"""

from collections.abc import Iterator
from pathlib import Path

from ..data.neighbor_table import FACTS, NeighborTable, table_files
from ..datastore import Datastore
from ..datastore.checks import Check, check_file, check_record, verify_datastore
from ..datastore.manifest import MANIFEST
from ..errors import KnnlmError
from ..heads import open_head
from ..heads.head_file import HEAD
from ..index import list_indexes
from ..index.checking import SAMPLED_ENTRIES, is_sampled, verify_index
from ..saved_runs.format import RUN, SavePart


def verify_folder(folder: str | Path, everything: bool = False) -> Iterator[Check]:
    """Every check, as it is done, of a datastore with its indexes, a save, a table of neighbours, or a head.

    Args:
        everything: check every entry of an index; by default, of a large one, a sample
    """
    folder = Path(folder)
    if (folder / RUN).exists():
        yield check_record(folder / RUN)
        part = SavePart.open(folder)  # which compares the arrays with their checksums
        yield Check(f"save of {part.run.tokens:,} tokens")
    elif (folder / FACTS).exists():
        yield from _verify_table(folder)
    elif (folder / HEAD).exists():
        yield check_record(folder / HEAD)
        _, facts = open_head(folder)  # which compares the arrays with their checksums
        yield Check(f"head of {facts.row_count:,} rows")
    else:
        if not (folder / MANIFEST).exists():
            raise KnnlmError(
                f"{folder} is not a datastore (no {MANIFEST}), a save, a table of neighbours or a head; give a folder "
                "that --knn-dump, --knn-save, knnlm neighbors or knnlm learn wrote"
            )
        datastore = Datastore(folder)
        yield from verify_datastore(datastore)
        for info in list_indexes(datastore):
            part_of = f", {SAMPLED_ENTRIES:,} entries sampled; --all checks every one"
            sampled = part_of if info.factory and is_sampled(datastore, everything) else ""
            yield Check(f"index {info.name}{sampled}", verify_index(datastore, info, everything))


def _verify_table(folder: Path) -> Iterator[Check]:
    yield check_record(folder / FACTS)
    table = NeighborTable(folder)
    for name, expected in table_files(folder):
        yield check_file(folder / name, expected, "delete it and run knnlm neighbors again")
    yield Check(f"table of {len(table):,} rows")
