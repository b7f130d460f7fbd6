"""The mixture joins the LM and any number of memories: scores of tokens, of raw text, and generation."""
