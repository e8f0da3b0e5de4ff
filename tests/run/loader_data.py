"""Datasets and loaders as users write them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    """Sample i is i, with random augmentation of three kinds."""

    def __init__(self, count=10):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        noise = torch.tensor([float(torch.rand(())), random.random(), np.random.rand()])
        return torch.tensor([float(i)]), noise


class Stream(IterableDataset):
    def __init__(self, count=7):
        self.count, self.epoch = count, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.count):
            yield torch.tensor([float(i), float(self.epoch), float(torch.rand(()))])


def shuffled(workers=0, **options):
    return DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers, **options)


def with_workers():
    return shuffled(workers=2)


def dropping():
    return shuffled(drop_last=True)


def weighted():
    return DataLoader(Noisy(), sampler=WeightedRandomSampler(torch.arange(10.0), 20))


def own_generator():
    return DataLoader(Noisy(), shuffle=True, generator=torch.Generator().manual_seed(5))


def collated():
    return DataLoader(Noisy(), batch_size=2, collate_fn=lambda items: [torch.stack([x for x, _ in items]).sum(1), torch.stack([y for _, y in items])])


def dictionaries():
    return DataLoader(Noisy(), batch_size=2, collate_fn=lambda items: {"input_ids": items[0][0], "labels": items[0][1]})


def streamed():
    return DataLoader(Stream(), batch_size=2)


def batched():
    return DataLoader(Noisy(), batch_sampler=Pairs(range(10), 2, False))


class Pairs(BatchSampler):
    pass


def distributed():
    return DataLoader(Noisy(), sampler=DistributedSampler(Noisy(), num_replicas=2, rank=0))


def nothing():
    return Stream(0)


def too_few():
    return DataLoader(Noisy(3), drop_last=True, batch_size=2)

