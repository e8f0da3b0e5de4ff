"""The tensors behind a rank's buffers: sizes beside the program, padding, sharing, what is let go, and staging that is used again."""

from __future__ import annotations

import pytest
import torch
from levels_rig import rank_of
from tensor_rig import plan_case

from meshwright.decide.layout.data_sharding import DataSharding
from meshwright.errors import Unsupported
from meshwright.plan.shards import local_values
from meshwright.run.executor.memory import DYNAMIC, RankMemory, StagingPool

CPU = torch.device("cpu")


def memory_of(rank: int, degrees: tuple[int, int, int] = (1, 2, 1), level: int = 0) -> tuple[RankMemory, object, dict[str, object]]:
    case = plan_case("even", degrees, microbatch=1, **({"sharding": DataSharding(level, True, 1500)} if level else {}))
    module, *_ = rank_of(case, rank, "adamw")
    values = local_values(case.layout, rank)
    return RankMemory(case.program, rank, CPU, values, module.flats, layout=case.layout), case.program, values


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_are_as_the_program_and_the_layout_say(rank: int) -> None:
    memory, program, values = memory_of(rank)
    b = program.buffers  # type: ignore[attr-defined]
    own = [i for i in range(len(b)) if b.actor[i] == rank]
    assert sorted(memory.by_name.values()) == own and all(memory.infos[i] is None for i in range(len(b)) if i not in own)
    dynamic = 0
    for i in own:
        info = memory.infos[i]
        if info is None or not info.kind:
            continue
        size = int(b.chunks[i]) * int(b.chunk_bytes[i])
        assert info.elements * info.dtype.itemsize == size and info.per_chunk * info.dtype.itemsize == int(b.chunk_bytes[i])
        if info.kind in DYNAMIC:
            dynamic += 1
            value = values[info.value]
            assert info.shape == value.shape and info.numel == torch.Size(info.shape).numel() and info.numel <= info.elements  # type: ignore[attr-defined]
            assert b.name[i] == f"{info.kind}:{info.value}:{info.microbatch}" and info.dtype == getattr(torch, value.dtype)  # type: ignore[attr-defined]
    assert dynamic > 2


def test_what_is_put_is_read_and_let_go() -> None:
    memory, _, _ = memory_of(0)
    i = next(i for i in memory.transferred if (x := memory.infos[i]) is not None and x.kind == "act")
    info = memory.info(i)
    value = torch.arange(info.numel, dtype=info.dtype).view(info.shape)
    memory.put(i, value)
    assert memory.read(i) is value and memory.flats[i] is not None and memory.flats[i].data_ptr() == value.data_ptr()
    turned = value.view(-1, info.shape[-1]).t().contiguous().t().view(info.shape) if len(info.shape) > 1 else value
    memory.put(i, turned)
    assert torch.equal(memory.read(i), value) and memory.values[i].is_contiguous()  # type: ignore[arg-type, union-attr]
    memory.overwritten.add(i)
    memory.put(i, value, shared=True)
    assert memory.read(i).data_ptr() != value.data_ptr(), "a message may be written into it"  # type: ignore[union-attr]
    memory.drop(i)
    assert memory.read(i) is None and memory.flats[i] is None
    assert bool((memory.make(i, zero=True) == 0).all()) and memory.make(i) is memory.flats[i]
    memory.drop_values()
    assert memory.values[i] is None
    with pytest.raises(Unsupported, match="of rank 0 cannot be sent or received"):
        memory.info(next(j for j, x in enumerate(memory.infos) if x is None))


def test_chunks_that_round_a_value_up_are_filled_with_zero() -> None:
    memory, _, _ = memory_of(0)
    i = next(i for i in memory.transferred if (x := memory.infos[i]) is not None and x.kind == "act")
    info = memory.info(i)
    from dataclasses import replace

    memory.infos[i] = replace(info, elements=info.numel + 3)
    memory.put(i, torch.ones(info.shape, dtype=info.dtype))
    flat = memory.flats[i]
    assert flat is not None and flat.tolist() == [1.0] * info.numel + [0.0] * 3 and memory.read(i).shape == info.shape  # type: ignore[union-attr]


def test_staging_is_used_again_and_does_not_grow() -> None:
    pool = StagingPool(CPU)
    first = pool.take(10, torch.float32)
    assert (first.numel(), first.dtype) == (10, torch.float32)
    pool.give(first)
    assert pool.take(10, torch.float32) is first
    pool.give(first)
    head = pool.take(4, torch.float32)
    assert head.numel() == 4 and head.data_ptr() == first.data_ptr(), "the head of a longer one"
    assert pool.take(10, torch.float32).data_ptr() != first.data_ptr(), "which is away as a whole"
    pool.give(head)
    assert pool.take(10, torch.float32).data_ptr() == first.data_ptr()
    pool.give(first)
    assert pool.take(3, torch.float64).dtype == torch.float64
    pool.take(20, torch.float32)
    assert not pool.free[10, torch.float32], "a longer one was made in exchange"
