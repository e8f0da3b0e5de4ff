"""What rank 0 works out once and the others read, by the store that torch.distributed came up with; or its error, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...errors import MeshwrightError, RunError
from ..machine.process import blob_get, blob_put

__all__ = ["FirstRank"]

_made = count()  # so far: rank 0's number names the keys in the store


class FirstRank:
    """All ranks of `group` make one at the same time; None: this process is alone."""

    def __init__(self, rank: int, group: Any) -> None:
        self.rank = rank
        number = torch.tensor([next(_made)])
        if group is not None:
            dist.broadcast(number, 0, group)
        whole = dist.HashStore() if group is None else dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"meshwright/parallelize/{int(number)}", whole)

    def gives(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Rank 0 makes it; once per name. Raises: on rank 0 what `make` raises; RunError with the same words on the others."""
        failed = f"{name}/failed"
        if self.rank:
            if told := blob_get(self.store, failed):
                error = msgspec.json.decode(told, type=dict[str, str])
                raise RunError(f"rank 0 refused: {error['message']}", where=error["where"], hint=error["hint"], data={"code": error["code"]})
            return blob_get(self.store, name)
        try:
            found = make()
        except BaseException as error:
            own = error if isinstance(error, MeshwrightError) else RunError(f"{type(error).__name__}: {error}")
            blob_put(self.store, failed, msgspec.json.encode({"code": own.code, "message": own.message, "where": own.where, "hint": own.hint}))
            raise
        blob_put(self.store, name, found)
        blob_put(self.store, failed, b"")
        return found
