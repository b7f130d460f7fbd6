"""The sparse neural editor (He et al. 2020) but for its networks: prior, edit vectors, retriever, estimates."""
