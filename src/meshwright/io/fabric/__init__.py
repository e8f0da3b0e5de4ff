"""Fabrics from files and to files: by name, TOML, JSON, matrices of topology tools, adjacency lists."""
