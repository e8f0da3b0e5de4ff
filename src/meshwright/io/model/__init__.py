"""Models: operator graphs, and transformers by their sizes."""
