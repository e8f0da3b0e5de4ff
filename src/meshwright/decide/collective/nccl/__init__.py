"""What NCCL would choose, by a model of its tuner."""
