"""What must stand in the environment before torch is first imported; the first import of `conftest`.

Where triton is installed its kernels are interpreted, without a device: it reads this once, when torch's compiler imports it.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
