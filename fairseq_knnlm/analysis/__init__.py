"""What can be learnt from a saved run without model and search: see ``save.py``."""
