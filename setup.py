"""Installs fairseq-knnlm.

FAISS is an extra, ``pip install 'fairseq-knnlm[cpu]'`` or ``[gpu]``: the two wheels provide the same module ``faiss``,
overwrite each other when both are installed, and only the user knows which one fits the machine.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version that the package states; reading it avoids an import that would need fairseq and torch."""
    source = (HERE / "fairseq_knnlm" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)[1]


def long_description() -> str:
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="fairseq-knnlm",
    version=version(),
    description="Nearest-neighbour language models for fairseq, through its stock commands",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["fairseq_knnlm*"]),
    package_data={"fairseq_knnlm": ["py.typed"], "fairseq_knnlm.inspector": ["*.html", "*.css", "*.js"]},
    python_requires=">=3.11",
    install_requires=[
        "fairseq-fixed>=0.12.3",
        "numpy>=2.0",
        "sacremoses",
        "torch>=2.6",  # from which on a checkpoint cannot run code when it is loaded
        "tqdm",
    ],
    extras_require={
        "cpu": ["faiss-cpu>=1.12"],
        "gpu": ["faiss-gpu-cu12>=1.12"],
        "plots": ["matplotlib"],
        "ray": ["ray>=2.40"],
        "hf": ["safetensors", "tokenizers", "transformers>=5"],
        "docs": ["mkdocs", "mkdocs-material"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-xdist", "ruff"],
    },
    entry_points={"console_scripts": ["knnlm = fairseq_knnlm.cli:main"]},
)
