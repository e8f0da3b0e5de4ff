"""`collective bench`: what nccl-tests measures, on any torch.distributed backend, on processes or in the lab."""
