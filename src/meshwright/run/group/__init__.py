"""Collective programs on real tensors: compiled per rank, walked by one thread per process group, behind a torch.distributed backend."""
