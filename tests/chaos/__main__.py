"""Disturb every command that writes, in every way that happens in practice, and count what was lost: nothing.

    python tests/chaos             all of it, some minutes; prints a table
    python tests/chaos --short     a small part of everything, for the test suite
    python tests/chaos --page docs/reliability.md   also writes the page
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bad_bytes import run_bad_bytes
from bad_input import run_bad_input
from kill import run_kills
from live_server import run_server
from page import write_page
from together import run_together
from workshop import Workshop
from write_faults import run_write_faults

from fairseq_knnlm.report.tables import table

PARTS = ("kill", "together", "write faults", "bad bytes", "bad input", "server")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small part of everything")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--page", metavar="FILE", help="write the table to a page")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    short = args.short
    runs = {
        "kill": lambda workshop: run_kills(workshop, 8 if short else 100),
        "together": lambda workshop: run_together(workshop, 1 if short else 5),
        "write faults": lambda workshop: run_write_faults(workshop, every=29 if short else 1),
        "bad bytes": lambda workshop: run_bad_bytes(workshop, 12 if short else 300),
        "bad input": run_bad_input,
        "server": lambda workshop: run_server(workshop, 100 if short else 1000),
    }
    rows, losses = [], 0
    try:
        workshop = Workshop(folder)
        for part in args.only or PARTS:
            started = time.perf_counter()
            try:
                counts = runs[part](workshop)
            except AssertionError as error:  # a part stops at its first loss; the others go on
                losses += 1
                traceback.print_exc()
                rows.append([part, str(error).splitlines()[0][:80] if str(error) else "see the traceback", "-", "1"])
                continue
            for what, count in counts.items():
                rows.append([part, what, f"{count:,}", "0"])
            seconds = time.perf_counter() - started
            print(f"{part}: {sum(counts.values()):,} in {seconds:.0f} s, nothing lost", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print()
    print(table(["disturbance", "of", "count", "losses"], rows, left=("disturbance", "of")))
    if args.page:
        write_page(Path(args.page), rows)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
