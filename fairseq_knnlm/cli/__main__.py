"""``python -m fairseq_knnlm.cli``: the command where it is not installed."""

import sys

from .main import main

sys.exit(main())
