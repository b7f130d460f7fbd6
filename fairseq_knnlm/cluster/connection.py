"""Connecting to a Ray cluster, and Ray's errors as one sentence each."""

import importlib.util
import logging
import os
import socket
from typing import Any

from ..errors import KnnlmError, is_verbose

NO_RAY = "ray is missing; run pip install 'fairseq-knnlm[ray]', or leave --knn-engine ray out"
NAMESPACE = "knnlm"  # in which our actors have their names
SECONDS_TO_ANSWER = 10  # that the head of a cluster has to accept a connection


def import_ray() -> Any:
    """The module ray, if it is installed."""
    if importlib.util.find_spec("ray") is None:
        raise KnnlmError(NO_RAY)
    # A Ray that we start sends no statistics of its use anywhere, and does not warn of what its next release changes.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    return ray


def check_address(address: str) -> None:
    """Refuse what is no address, before anything is opened."""
    host, _, port = address.rpartition(":")
    if address not in ("auto", "local") and not (host and port.isdigit() and not address.startswith("ray:")):
        raise KnnlmError(
            f"--knn-ray-address takes auto (the cluster that this machine belongs to), HOST:PORT of its head, or local "
            f"(this machine alone), not '{address}'"
        )


def connect(address: str) -> Any:
    """Join the cluster at this address, or start one of this machine alone (local); the module ray.

    A process that is connected already stays so, whatever the address: it cannot be in two clusters.
    """
    check_address(address)
    ray = import_ray()
    if ray.is_initialized():
        return ray
    settings: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": is_verbose()}
    if not is_verbose():
        settings["logging_level"] = logging.ERROR
    if address == "local":
        settings["include_dashboard"] = False
    elif address != "auto":
        _check_answers(address)
    try:
        ray.init(address=address, **settings)
    except ConnectionError as error:
        raise KnnlmError(
            "there is no Ray cluster on this machine; start one with ray start --head, join one with "
            "ray start --address HOST:PORT, or use --knn-ray-address local"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise KnnlmError(f"the Ray cluster at {address} cannot be used: {describe(error)}") from error
    return ray


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise KnnlmError(
            f"no Ray cluster answers at {address} ({error}); start its head with ray start --head --port {port}, and "
            "see that this machine may reach it"
        ) from error


def describe(error: BaseException) -> str:
    """What went wrong, in one line."""
    cause = getattr(error, "cause", None)  # of an error that another process raised
    lines = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    version = text.partition("Version mismatch:")[2]
    if version:
        return f"it runs other versions than this process:{version}; install the same Python and Ray on every node"
    return text[:400]
