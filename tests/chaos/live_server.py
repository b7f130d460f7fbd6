"""The live page of ``knnlm inspect --serve`` under load and under attack."""

import os
import re
import signal
import socket
import time

from server import run_server_chaos
from workshop import Process, Workshop


def run_server(workshop: Workshop, parallel: int) -> dict[str, int]:
    """Start the real command, disturb it, and end it with Ctrl-C; how many requests of each kind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = Process(
        ["knnlm", "inspect", "--serve", "--port", port, "--path", workshop.model, "--data", workshop.data,
         "--datastore", workshop.store, "--knn-index", "IVF16,SQfp16"]
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not re.search(rf"http://127.0.0.1:{port}", process._read()):
        assert time.monotonic() < deadline, process._read()
        time.sleep(0.1)
    counts = run_server_chaos("127.0.0.1", port, parallel)
    os.kill(process.pid, signal.SIGINT)
    outcome = process.wait()
    assert outcome.code == 0 and "Traceback" not in outcome.output, outcome.output[-3000:]
    return counts
