"""A loop of `sensitivity.py`: decodes JPEG pictures in loader workers, or multiplies matrices; the device's time is paced. One line a step."""

from __future__ import annotations

import io
import sys
import time

import torch

PICTURES, SIDE = 60, 256  # of a batch; decoded on the processor, about 55 ms together
DEVICE_S = {"decode": 0.020, "matmul": 0.030}
WORKERS = 2
MATRIX = 192  # half a millisecond on one core


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        import numpy as np
        from PIL import Image

        rough = np.random.default_rng(0).integers(0, 255, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(rough).resize((SIDE, SIDE)).save(out, format="JPEG", quality=92)
        self.data = out.getvalue()

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy as np
        from PIL import Image

        return torch.from_numpy(np.array(Image.open(io.BytesIO(self.data)).convert("RGB")))


def main(kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "decode":
        batches = iter(torch.utils.data.DataLoader(Pictures(), batch_size=PICTURES, num_workers=WORKERS, prefetch_factor=2))
    matrix = torch.rand(MATRIX, MATRIX)
    while True:
        if kind == "decode":
            next(batches)
        else:
            matrix = torch.tanh(matrix @ matrix)
        time.sleep(DEVICE_S[kind])
        print("step", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
