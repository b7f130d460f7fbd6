"""What fairseq registers. ``--user-dir`` imports this folder by itself, so what fairseq needs is set up here."""

from ..errors import show_knnlm_errors_as_one_sentence
from ..fairseq_setup import set_up_fairseq

show_knnlm_errors_as_one_sentence()
set_up_fairseq()
