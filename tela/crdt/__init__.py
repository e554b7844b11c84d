"""The replicated registry: a lattice of owner-signed records, its merging map, and the view that routing reads."""
