"""The nets that memory planning is measured on, in plain torch: ResNet-50 (small images), VGG-11, U-Net, a 12-layer GPT, a SwiGLU/RMSNorm block.

Each function takes nothing and returns (module, (input, target)), as every model function; `NETS` names them with their loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

NETS = dict.fromkeys(("resnet50", "vgg11", "unet", "gpt12"), "cross-entropy") | {"swiglu": "mse"}


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inside = [], width
        for i, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(inside, width * 2**i, 2 if k == 0 and i else 1))
                inside = 4 * width * 2**i
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


VGG11 = (1, "m", 2, "m", 4, 4, "m", 8, 8, "m", 8, 8, "m")
VGG16 = (1, 1, "m", 2, 2, "m", 4, 4, 4, "m", 8, 8, 8, "m", 8, 8, 8, "m")


class VGG(nn.Module):
    """`side`: of the images; a multiple of 32."""

    def __init__(
        self, steps: tuple[int | str, ...] = VGG11, side: int = 64, width: int = 64, hidden: int = 512, classes: int = 100
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for step in steps:
            if step == "m":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(inside, width * int(step), 3, 1, 1), nn.ReLU()]
                inside = width * int(step)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(inside * (side // 32) ** 2, hidden), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


class UNet(nn.Module):
    def __init__(self, width: int = 16, levels: int = 4, classes: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(self.pair(a, b) for a, b in zip((3, *sizes), sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True))
        self.merge = nn.ModuleList(self.pair(2 * a, a) for a in sizes[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def pair(inside: int, outside: int) -> nn.Module:
        first = (nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU())
        return nn.Sequential(*first, nn.Conv2d(outside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), kept.pop()), 1))
        return self.head(x).permute(0, 2, 3, 1)


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down, self.drop = nn.Linear(size, 4 * size), nn.Linear(4 * size, size), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)) * (h // self.heads) ** -0.5
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        y = F.softmax(scores.masked_fill(~mask, -1e9), -1) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int = 12, size: int = 256, heads: int = 4, sequence: int = 128, vocabulary: int = 1000, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, size), nn.Parameter(torch.zeros(sequence, size))
        self.blocks, self.norm = nn.ModuleList(Layer(size, heads, dropout) for _ in range(layers)), nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class SwiGLU(nn.Module):
    def __init__(self, layers: int = 4, size: int = 256, hidden: int = 688) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(size) for _ in range(layers))
        self.gates, self.ups = (nn.ModuleList(nn.Linear(size, hidden, bias=False) for _ in range(layers)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(hidden, size, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, gate, up, down in zip(self.norms, self.gates, self.ups, self.downs, strict=True):
            y = norm(x)
            x = x + down(F.silu(gate(y)) * up(y))
        return x


def images(batch: int, side: int, classes: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))


def resnet50() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return ResNet(), images(8, 64)


def vgg11() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return VGG(), images(8, 64)


def vgg16() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """As published: 138 M parameters, images of 224."""
    return VGG(VGG16, side=224, hidden=4096, classes=1000), images(8, 224, classes=1000)


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return UNet(), (torch.randn(4, 3, 96, 96), torch.randint(0, 4, (4, 96, 96)))


def gpt12() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return GPT(), (torch.randint(0, 1000, (8, 128)), torch.randint(0, 1000, (8, 128)))


def swiglu() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return SwiGLU(), (torch.randn(8, 128, 256), torch.randn(8, 128, 256))
