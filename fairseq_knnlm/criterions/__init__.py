"""Losses for ``fairseq-train``. fairseq looks into ``tasks/`` and ``models/`` only, so the tasks import this folder."""
