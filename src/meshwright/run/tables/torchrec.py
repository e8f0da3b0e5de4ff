"""torchrec's own `ShardingPlan` object from an exported plan, for `DistributedModelParallel(module, plan=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FormatError, MissingExtra

__all__ = ["sharding_plan"]


def sharding_plan(document: Mapping[str, Any], *, device: str = "cpu") -> Any:
    """A `torchrec.distributed.types.ShardingPlan` of what `io.export.torchrec` wrote. Raises: MissingExtra without torchrec; FormatError."""
    try:
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # type: ignore[import-not-found]  # noqa: F401
        from torchrec.distributed.types import (  # type: ignore[import-not-found]
            EmbeddingModuleShardingPlan,
            ParameterSharding,
            ShardingPlan,
        )
    except ImportError:
        raise MissingExtra("torchrec", extra="torchrec", needed_for="a torchrec plan") from None
    found: dict[str, Any] = {}
    try:
        for module, tables in document["plan"].items():
            found[module] = EmbeddingModuleShardingPlan({
                name: ParameterSharding(
                    sharding_type=t["sharding_type"], compute_kernel=t["compute_kernel"], ranks=list(t["ranks"]),
                    sharding_spec=EnumerableShardingSpec([
                        ShardMetadata(list(s["shard_offsets"]), list(s["shard_sizes"]), f"rank:{r}/{device}")
                        for s, r in zip(t["sharding_spec"]["shards"], t["ranks"], strict=True)
                    ]),
                ) for name, t in tables.items()
            })  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"lacks or mangles {error}", where="plan", hint="make it with `meshwright tables export`") from None
    return ShardingPlan(found)
