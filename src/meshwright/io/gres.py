"""GPUs in Slurm's lists of generic resources, as `scontrol` prints them: `gpu:a100:4(S:0-1),mps:400`, `gpu:3090:2(IDX:0,3)`, `gpu:8`, `gpu:(null):2`.

A list has parts `name[:type][:count]`. A type may be a number. The count is the last word where that is one, else 1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Gpus", "gpus_in"]

_PART = re.compile(r"(?:[^,()]|\([^()]*\))+")  # commas within parentheses are of numbers
_GPUS = re.compile(r"gpu((?::(?:[\w.+-]+|\(null\)))*)(?:\(([^()]*)\))?", re.ASCII)


class Gpus(NamedTuple):
    """`type` "": not said. `numbers`: as in `IDX:0-1,3`, "" where a list says none."""

    type: str
    gpus: int
    numbers: str


def gpus_in(gres: str) -> list[Gpus]:
    found = []
    for part in _PART.findall(gres):
        if match := _GPUS.fullmatch(part):
            words = [w for w in match[1].split(":")[1:] if w not in ("(null)", "no_consume")]
            count = int(words.pop()) if words and re.fullmatch(r"[0-9]{1,6}", words[-1]) else 1
            numbers = re.fullmatch(r"IDX:([0-9,-]+)", match[2] or "")
            found.append(Gpus(words[0] if words else "", count, numbers[1] if numbers else ""))
    return found
