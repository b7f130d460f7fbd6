"""The chaos harness, in short."""

import re
import sys

import pytest
from commands import REPO, run


@pytest.mark.parametrize("parts", [("kill", "together", "write faults", "bad bytes"), ("bad input", "server")])
def test_chaos_in_short(parts):
    """A little of each disturbance; make chaos does all of it."""
    only = [word for part in parts for word in ("--only", part)]
    result = run(sys.executable, REPO / "tests/chaos", "--short", *only)
    for part in parts:
        assert re.search(rf"^{part}: [1-9]", result.stdout, re.MULTILINE), result.stdout
