"""NCCL's topology, graph and tuner files."""
