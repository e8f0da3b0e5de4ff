"""What really runs: executor, groups, training, launching, checkpoints."""
