"""`collective bench`: what nccl-tests measures, on any torch.distributed backend."""
