"""Other tools' schedules to and from `Program`: MSCCL, MSCCL++, Chakra. Files are read and written by `io`."""

from .from_chakra import from_chakra
from .from_msccl import import_msccl
from .from_mscclpp import import_mscclpp
from .to_chakra import to_chakra
from .to_msccl import lower_to_msccl
from .to_mscclpp import to_mscclpp

__all__ = ["from_chakra", "import_msccl", "import_mscclpp", "lower_to_msccl", "to_chakra", "to_mscclpp"]
