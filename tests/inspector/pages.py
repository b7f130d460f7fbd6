"""A page's program in node, and data for it that needs no model."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from fairseq_knnlm.inspector.page import _read, embed

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run_node(program: str) -> Any:
    """The JSON that a program prints."""
    result = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def compute(expression: str, data: Any = None) -> Any:
    """An expression over the functions of numbers.js and ``data``."""
    return run_node(f"{_read('numbers.js')}\nconst data = {embed(data)};\nconsole.log(JSON.stringify({expression}));")
