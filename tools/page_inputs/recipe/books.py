"""Random tokens, as a map-style dataset."""

import torch


class Books(torch.utils.data.Dataset):
    def __init__(self, seed: int) -> None:
        self.tokens = torch.randint(0, 256, (64, 129), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[i, :-1], self.tokens[i, 1:]


def train() -> Books:
    return Books(0)


def held_out() -> Books:
    return Books(1)
