"""Text as the models read it: blocks with their context, lanes, and tables of neighbours."""
