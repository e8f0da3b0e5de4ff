"""Codec states in files: same bits back, other world sizes, other groups, and nothing lost in silence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.codec.codec import parse_codec
from meshwright.errors import FormatError, UsageError
from meshwright.run.codecs import At, State, make_codec
from meshwright.run.codecs.saved import Group, Part, Piece, load_packed, load_states, packed, read_states, save_states, state_file

TENSORS = (("a.weight", (8, 16)), ("a.bias", (8,)), ("b.weight", (30,)))
GROUPS = {"g0": Group("topk:density=0.1", TENSORS[:2]), "g1": Group("dgc:density=0.2", TENSORS[2:])}
KINDS = ("powersgd:rank=1", "threshold:density=0.1", "signum", "efsign")


def trained(groups: dict[str, Group], rank: int, world: int, steps: int = 3) -> dict[str, State]:
    states = {}
    for name, group in groups.items():
        codec = make_codec(parse_codec(group.codec), group.shapes, name=name)
        states[name] = codec.new_state()
        for step in range(steps):
            x = torch.randn(codec.elements, generator=torch.Generator().manual_seed(100 * rank + step))
            at = At(step=step, rank=rank, world=world)
            payload = codec.encode(x, states[name], at)
            while (following := codec.advance(payload, states[name], at)) is not None:
                payload = following
    return states


def saved(folder: Path, groups: dict[str, Group], world: int) -> list[dict[str, State]]:
    found = [trained(groups, rank, world) for rank in range(world)]
    for rank, states in enumerate(found):
        save_states(folder, groups, states, step=3, rank=rank, world=world)
    return found


def total(states: list[dict[str, State]], group: str, kind: str = "residual") -> torch.Tensor:
    return torch.stack([s[group][kind].double() for s in states]).sum(0)


def test_the_same_ranks_get_their_bits(tmp_path: Path) -> None:
    groups = {**GROUPS, **{f"k{i}": Group(text, (("c", (12, 12)),)) for i, text in enumerate(KINDS)}}
    before = saved(tmp_path, groups, 2)
    for rank in range(2):
        after = load_states(tmp_path, groups, rank=rank, world=2)
        assert {g: set(s) for g, s in after.items()} == {g: set(s) for g, s in before[rank].items()}
        assert all(torch.equal(t, before[rank][g][k]) for g, s in after.items() for k, t in s.items())


@given(st.integers(1, 6), st.integers(1, 6))
def test_other_world_sizes_keep_the_total(tmp_path_factory: pytest.TempPathFactory, old: int, new: int) -> None:
    folder = tmp_path_factory.mktemp("states")
    before = saved(folder, GROUPS, old)
    for batch, factor in (("per-rank", 1.0), ("global", new / old)):
        after = [load_states(folder, GROUPS, rank=r, world=new, batch=batch) for r in range(new)]  # type: ignore[arg-type]
        for group, kind in (("g0", "residual"), ("g1", "residual"), ("g1", "velocity")):
            assert torch.allclose(total(after, group, kind), total(before, group, kind) * factor, rtol=1e-6, atol=1e-6)


def test_residuals_follow_their_tensors(tmp_path: Path) -> None:
    """Fused otherwise, by another codec: tensor by tensor the same; starts of the unchanged group stay."""
    power = {"p": Group("powersgd:rank=1", (("c", (12, 12)),)), **GROUPS}
    before = saved(tmp_path, power, 2)
    regrouped = {
        "p": power["p"], "one": Group("efsign", (TENSORS[1],)), "rest": Group("topk", (TENSORS[0],)), "dgc": Group("dgc", (TENSORS[2],)),
    }  # fmt: skip
    after = [load_states(tmp_path, regrouped, rank=r, world=1) for r in range(1)]
    assert torch.allclose(torch.cat([total(after, "rest"), total(after, "one")]), total(before, "g0"), atol=1e-6)
    assert torch.allclose(total(after, "dgc", "velocity"), total(before, "g1", "velocity"), atol=1e-6)
    assert torch.equal(after[0]["p"]["q"], before[0]["p"]["q"])


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, GROUPS, 2)
    without = {"g0": Group("fp16", TENSORS[:2]), "g1": GROUPS["g1"]}
    with pytest.raises(UsageError, match=r"a\.bias, a.weight has no place"):
        load_states(tmp_path, without, rank=0, world=2)
    kept = load_states(tmp_path, without, rank=0, world=2, drop_residual=True)
    assert not kept["g0"] and kept["g1"]["residual"].any()
    with pytest.raises(UsageError, match=r"b\.weight has no place"):
        load_states(tmp_path, {"g0": GROUPS["g0"]}, rank=0, world=2)
    with pytest.raises(UsageError, match=r"a\.bias, a.weight, b.weight has no place"):
        load_states(tmp_path, {"n": Group("topk", tuple((n, (*s, 2)) for n, s in TENSORS))}, rank=0, world=2)
    fresh = load_states(tmp_path / "nowhere", GROUPS, rank=0, world=2, drop_residual=True)
    assert not fresh["g0"]["residual"].any()


def test_files_that_are_missing_or_wrong(tmp_path: Path) -> None:
    before = saved(tmp_path, GROUPS, 3)
    state_file(tmp_path, 2).unlink()
    assert load_states(tmp_path, GROUPS, rank=1, world=3)
    with pytest.raises(FormatError, match="cannot be read") as caught:
        load_states(tmp_path, GROUPS, rank=0, world=2)
    assert "drop_residual" in caught.value.hint
    save_states(tmp_path, GROUPS, before[2], step=4, rank=2, world=3)
    with pytest.raises(FormatError, match="expected 2 of 3 at 3"):
        load_states(tmp_path, GROUPS, rank=0, world=2)
    with pytest.raises(FormatError, match="cannot be read"):
        load_states(tmp_path / "nowhere", GROUPS, rank=0, world=1)


def test_every_damaged_file_is_refused(tmp_path: Path) -> None:
    """Each byte of a small file changed in turn, and the file cut at many places: the right states or a FormatError."""
    small = {"g": Group("topk:density=0.5", (("w", (2, 3)),))}
    saved(tmp_path, small, 1)
    path = state_file(tmp_path, 0)
    good = path.read_bytes()
    _, expected = read_states(path)
    refused = 0
    for at in range(0, len(good), 2):
        for data in (good[:at] + bytes([good[at] ^ 0x15]) + good[at + 1 :], good[:at]):
            path.write_bytes(data)
            try:
                _, found = read_states(path)
            except FormatError:
                refused += 1
            else:
                assert [t.tolist() for s in found.values() for t in s.values()] == [t.tolist() for s in expected.values() for t in s.values()]
    assert refused > len(good) * 0.9


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (Group("nonsense", TENSORS), "no codec"), (Group("topk:density=7", TENSORS), "outside"), (Group("topk", (("a", (-3,)),)), "negative size"),
        (Group("topk", (("a", (1 << 30, 1 << 30)),)), "missing or not of 1152921504606846976"), (Group("topk", (("a", (5,)),)),
        "g/residual is missing or not of 5"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be(tmp_path: Path, group: Group, match: str) -> None:
    path = save_states(tmp_path, {"g": group}, {"g": {"residual": torch.zeros(4)}}, step=0, rank=0, world=1)
    with pytest.raises(FormatError, match=match):
        read_states(path)


def test_other_schemas(tmp_path: Path) -> None:
    path = save_states(tmp_path, {}, {}, step=0, rank=0, world=1)
    path.write_bytes(path.read_bytes().replace(b'version\\":1', b'version\\":2'))
    with pytest.raises(FormatError, match="version 2, expected"):
        read_states(path)


def test_in_memory_they_are_what_the_files_hold(tmp_path: Path) -> None:
    before = saved(tmp_path, GROUPS, 3)
    rows = [packed(GROUPS, states, step=3, rank=rank, world=3) for rank, states in enumerate(before)]
    for rank, row in enumerate(rows):
        step, own = load_packed(row, GROUPS, rank=rank, world=3)
        assert step == 3 and all(torch.equal(t, before[rank][g][k]) for g, s in own.items() for k, t in s.items())
    row["g0/residual"].zero_()
    with pytest.raises(FormatError, match="is not what was saved"):
        load_packed(rows, GROUPS, rank=0, world=2)
    rows[2] = packed(GROUPS, before[2], step=3, rank=2, world=3)
    after = [load_packed(rows, GROUPS, rank=rank, world=2)[1] for rank in range(2)]
    assert torch.allclose(total(after, "g0"), total(before, "g0"), atol=1e-6)
    assert [{k: v.tolist() for k, v in s["g0"].items()} for s in after] == [
        {k: v.tolist() for k, v in load_states(tmp_path, GROUPS, rank=rank, world=2)["g0"].items()} for rank in range(2)
    ]  # fmt: skip


def test_states_in_memory_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    states = [packed(GROUPS, s, step=3, rank=rank, world=2) for rank, s in enumerate(saved(tmp_path, GROUPS, 2))]
    later = packed(GROUPS, saved(tmp_path, GROUPS, 2)[1], step=4, rank=1, world=2)
    cases = [
        (states[:1], "states of ranks"), ([states[0]] * 2, "states of ranks"), ([states[0], later], "expected 1 of 2 at 3"), ([{}], "is no file"),
    ]  # fmt: skip
    for wrong, match in cases:
        with pytest.raises(FormatError, match=match):
            load_packed(wrong, GROUPS, rank=1, world=1 if "at 3" in match else 3)
    for rank, world in ((0, 3), (1, 2)):  # its own rank of another number of ranks; another rank of the same number
        with pytest.raises(FormatError, match="states of ranks"):
            load_packed(states[0], GROUPS, rank=rank, world=world)
    with pytest.raises(UsageError, match="has no place"):
        load_packed(states, {}, rank=0, world=1)
    assert load_packed(states, {}, rank=0, world=1, drop_residual=True) == (3, {})


def cut_up(ways: int, axis: int) -> list[Piece]:
    """A tensor of shape (6, 8) in this many pieces, each of two ranges."""
    half = (6, 8)[axis] // 2
    edges = [half * i // ways for i in range(ways + 1)]
    return [Piece((6, 8), axis, tuple((base + a, base + b) for base in (0, half))) for a, b in pairwise(edges)]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_pieces_are_put_together_and_cut_anew(
    tmp_path_factory: pytest.TempPathFactory, world: int, ways: int, later: int, fewer: int, axis: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")

    def of(part: Part) -> dict[str, Group]:
        own = {"o": Group("topk", ((f"own{part.number}", (4,)),))} if part.of == ways else {}
        return {"w": Group("topk", (("w", part.pieces["w"].local()),)), **own}

    whole = torch.zeros(6, 8, dtype=torch.float64)
    for rank in range(world):
        for number, piece in enumerate(cut_up(ways, axis)):
            part = Part(number=number, of=ways, pieces={"w": piece})
            values = torch.randn(piece.local(), generator=torch.Generator().manual_seed(10 * rank + number))
            index = torch.tensor([i for a, b in piece.ranges for i in range(a, b)], dtype=torch.int64)
            whole.index_add_(axis, index, values.double())
            states = {"w": {"residual": values.reshape(-1)}, "o": {"residual": torch.zeros(4)}}
            save_states(folder, of(part), states, step=1, rank=rank, world=world, part=part)
    found = torch.zeros_like(whole)
    for rank in range(fewer):
        for number, piece in enumerate(cut_up(later, 1 - axis)):
            part = Part(number=number, of=later, pieces={"w": piece})
            state = load_states(folder, of(part), rank=rank, world=fewer, part=part)["w"]["residual"].view(piece.local())
            index = torch.tensor([i for a, b in piece.ranges for i in range(a, b)], dtype=torch.int64)
            found.index_add_(1 - axis, index, state.double())
    assert torch.allclose(found, whole, rtol=1e-6, atol=1e-6)


def test_pieces_that_cannot_be(tmp_path: Path) -> None:
    for piece, match in [
        (Piece((2, 3), 2, ((0, 1),)), "dimension 2"), (Piece((2, 3), 0, ((0, 5),)), "ranges"), (Piece((2, 3), 0, ((0, 1),)), "by its piece"),
    ]:  # fmt: skip
        part = Part(pieces={"w": piece})
        path = save_states(tmp_path, {"g": Group("topk", (("w", (2, 3)),))}, {"g": {"residual": torch.zeros(6)}}, step=0, rank=0, world=1, part=part)
        with pytest.raises(FormatError, match=match):
            read_states(path)


def test_what_other_parts_take_over_is_not_missed(tmp_path: Path) -> None:
    saved(tmp_path, GROUPS, 2)
    mine = {"g0": GROUPS["g0"]}
    assert load_states(tmp_path, mine, rank=0, world=1, part=Part(number=0, of=2), elsewhere={"b.weight"})["g0"]["residual"].any()
    with pytest.raises(UsageError, match=r"b\.weight has no place"):
        load_states(tmp_path, mine, rank=0, world=1, part=Part(number=0, of=2))
