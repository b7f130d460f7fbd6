"""Adopting datastores and indexes of the original implementation (github.com/urvashik/knnlm)."""
