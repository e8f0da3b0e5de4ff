"""Training plans whose gradient sums go through codecs: what ranks end with, against the same steps worked out in one process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import msgspec
import pytest
import torch
from compress_oracle import agree, by_codec, largest, serial
from compress_rig import Rank, planned, prepare, ran, trained
from rig import in_threads
from safetensors.torch import load_file

from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.lower.compressed import require_codecs_run
from meshwright.run.launch.request import RunRequest
from meshwright.run.launch.train_run import train_run


def close(a, b, tolerance=2e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), (2, False), (4, True)])
def test_topk_with_error_feedback_equals_the_serial_steps(ranks, overlap):
    plan = planned("topk:density=0.05", ranks=ranks, overlap=overlap, batch=4 * ranks)
    assert plan.layout.microbatches == 2 and {b.codec for b in plan.layout.buckets} == {"topk:density=0.05"}
    agree(plan, ran(plan, 4), serial(plan, 4, largest(0.05)))


def test_a_plan_that_compresses_nothing_is_the_plain_plan_and_trains_alike():
    fast = planned("auto", link="100GB/s")
    assert not any(b.codec for b in fast.layout.buckets) and fast.prediction.time_s <= planned(None, link="100GB/s").prediction.time_s
    plan = planned("topk:density=1")
    close(trained(plan, 3)[0], trained(planned(None), 3)[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("codec", ["int8", "efsign", "onebit", "qsgd", "terngrad", "fp8", "fp16", "bf16", "randomk:density=0.2", "powersgd:rank=2"])
def test_every_codec_sends_what_it_encodes(codec):
    plan = planned(codec)
    assert {b.codec for b in plan.layout.buckets} == {codec}
    halves = codec in ("fp16", "bf16")  # summed in another order, each time rounded to that type
    agree(plan, ran(plan, 3), serial(plan, 3, by_codec(plan)), tolerance=1e-3 if halves else 2e-5)


def residuals(plan, folder, steps):
    """Train, save what was not sent; digests by file, and the sum over ranks by parameter."""

    def body(rank, group):
        made = Rank(plan, rank, group)
        made.run(0, steps)
        digest = made.work.compressed.save(folder, steps)
        total = {}
        for g in made.work.compressed.groups.values():
            pieces = g.state["residual"].split([p.numel() for p in g.parts])
            total |= dict(zip(g.names, (p.clone() for p in pieces), strict=True))
        return digest, total

    prepare(plan)
    found = in_threads(plan.layout.ranks, body)
    sums = {n: sum(t[n].double() for _, t in found) for n in found[0][1]}
    return {name: digest for written, _ in found for name, digest in written.items()}, sums


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_residuals_go_on_with_another_number_of_replicas(tmp_path, before, after):
    digests, sums = residuals(planned("topk:density=0.05", ranks=before), tmp_path, 2)
    plan = planned("topk:density=0.1", ranks=after)
    total = {}
    for rank in range(after):
        made = Rank(plan, rank, None)
        made.work.compressed.load(tmp_path, digests, drop_residual=False)
        for g in made.work.compressed.groups.values():
            for n, piece in zip(g.names, g.state["residual"].split([p.numel() for p in g.parts]), strict=True):
                total[n] = total.get(n, 0) + piece.double()
    assert total.keys() == sums.keys() and any(t.any() for t in total.values())
    for n, value in sums.items():
        torch.testing.assert_close(total[n], value, rtol=1e-5, atol=1e-7)


def test_a_residual_without_a_place_or_a_damaged_one_is_refused(tmp_path):
    digests, _ = residuals(planned("topk:density=0.05"), tmp_path, 1)
    plain = Rank(planned(None), 0, None).work.compressed
    with pytest.raises(UsageError, match="has no place"):
        plain.load(tmp_path, digests, drop_residual=False)
    plain.load(tmp_path, digests, drop_residual=True)
    first = min(digests)
    again = Rank(planned("topk:density=0.05"), 0, None).work.compressed
    with pytest.raises(FormatError, match="digest differs"):
        again.load(tmp_path, digests | {first: "0" * 64}, drop_residual=False)
    (tmp_path / first).unlink()
    with pytest.raises(FormatError, match="cannot be read"):
        again.load(tmp_path, digests, drop_residual=False)
    (tmp_path / first).write_bytes(b"{}")
    with pytest.raises(FormatError, match="no file of codec states"):
        again.load(tmp_path, digests | {first: hashlib.sha256(b"{}").hexdigest()}, drop_residual=False)


def test_a_program_that_is_not_the_layouts_is_refused():
    plan = planned("topk:density=0.05")
    made = Rank(plan, 0, None)
    with pytest.raises(Unsupported, match="cannot execute 'encode'"):
        made.work.compressed.compile("encode", "codec0@99", made.executor.memory)
    denser = tuple(msgspec.structs.replace(b, codec="topk:density=0.9") for b in plan.layout.buckets)
    other = replace(plan, layout=msgspec.structs.replace(plan.layout, buckets=denser))
    with pytest.raises(Unsupported, match="no room"):
        Rank(other, 0, None)
    for asked in ({"local_shards": "x", "device": "cpu"}, {"local_shards": "", "device": "cuda"}):
        with pytest.raises(Unsupported, match="codecs"):
            require_codecs_run(plan.layout, **asked)
    require_codecs_run(planned(None).layout, local_shards="x", device="cuda")


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    plan = planned("topk:density=0.05")

    def go(folder, steps, **more):
        data = "tests/run/compress_model.py:samples"
        train_run(plan, RunRequest(out=tmp_path / folder, data=data, steps=steps, calibrate=False, module_spans=False, **more))

    go("halves", 2)
    go("halves", 3, resume=True)
    folder = tmp_path / "halves" / "checkpoint" / "step-00000003"
    found = {n.removeprefix("param:"): t for n, t in load_file(folder / "rank-000.safetensors").items() if n.startswith("param:")}
    whole = trained(plan, 3)[0]
    assert found.keys() == whole.keys() and all(torch.equal(found[n], whole[n]) for n in whole)
    index = json.loads((folder / "index.json").read_text())
    assert sorted(index["residuals"]) == ["codecs-000.safetensors", "codecs-001.safetensors"]
