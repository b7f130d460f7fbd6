"""The parts of the sparse neural editor (He et al. 2020) that know nothing of fairseq: prior, edit vector, retriever."""
