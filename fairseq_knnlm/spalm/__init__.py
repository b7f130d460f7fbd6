"""What a trained SPALM does with its memory (Yogatama et al. 2021)."""
