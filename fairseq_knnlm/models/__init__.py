"""Models that fairseq registers: Transformer-XL and SPALM. ``--user-dir`` imports this folder by itself."""
