"""What fairseq registers. ``--user-dir`` imports this folder by itself, so what fairseq needs is set up here."""

import sys

from ..errors import show_errors_as_one_sentence
from ..fairseq_setup import set_up_fairseq
from ..logs import hide_harmless_messages, show_our_lines_plainly
from ..near_matches import teach_fairseq_near_matches

show_errors_as_one_sentence()
set_up_fairseq()
if "fairseq_cli" in sys.modules:  # a command of fairseq runs, not a program of somebody's own
    hide_harmless_messages()
    show_our_lines_plainly()

    from .config import flags  # which imports FAISS, and FAISS logs what it loads

    teach_fairseq_near_matches(flags())
