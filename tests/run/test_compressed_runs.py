"""Training plans whose gradient sums go through codecs: what ranks end with, against the same steps worked out in one process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from compress_rig import MODEL, Rank, planned, prepare, rows, trained
from rig import in_threads, whole_model
from safetensors.torch import load_file

from meshwright.codec import parse_codec
from meshwright.errors import FormatError, Unsupported, UsageError
from meshwright.lowering_compressed import require_codecs_run
from meshwright.run.codecs import At, make_codec
from meshwright.run.codecs.saved import state_file
from meshwright.run.train import RunRequest, train_run


def serial(plan, steps, encoded, memories=None):
    """SGD on the mean over replicas of what `encoded(flat gradient, memory of group and replica)` gives; float32, no code of the runtime."""
    layout = plan.layout
    module, parameters, _ = whole_model(MODEL, seed=plan.seed)
    memories = {} if memories is None else memories
    for step in range(steps):
        own = []
        for replica in range(layout.data):
            module.zero_grad()
            for m in range(layout.microbatches):
                (module(*rows(step, replica, m, plan)) / layout.microbatches).backward()
            own.append({n: p.grad.clone() for n, p in parameters.items()})
        for number, bucket in enumerate(layout.buckets):
            names = [n for n in layout.stages[0].params if n in bucket.params]
            flats = [torch.cat([g[n].reshape(-1) for n in names]) for g in own]
            if bucket.codec:
                flats = [encoded(f, number, r, step, memories) for r, f in enumerate(flats)]
            mean = torch.stack(flats).sum(0) / layout.data
            with torch.no_grad():
                for n, piece in zip(names, mean.split([parameters[n].numel() for n in names]), strict=True):
                    parameters[n] -= 0.05 * piece.view(parameters[n].shape)
    return {n: p.detach() for n, p in parameters.items()}


def largest(density):
    """The k largest magnitudes of gradient and residual; the rest stays."""

    def encoded(flat, number, replica, step, memories):
        x = flat + memories.get((number, replica), 0)
        at = torch.topk(x.abs(), max(1, int(density * x.numel()))).indices
        sent = torch.zeros_like(x)
        sent[at] = x[at]
        memories[number, replica] = x - sent
        return sent

    return encoded


def close(a, b, tolerance=2e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), (2, False), (4, True)])
def test_topk_with_error_feedback_equals_the_serial_steps(ranks, overlap):
    plan = planned("topk:density=0.05", ranks=ranks, overlap=overlap, batch=4 * ranks)
    assert plan.layout.microbatches == 2 and {b.codec for b in plan.layout.buckets} == {"topk:density=0.05"}
    found = trained(plan, 4)
    assert all(torch.equal(found[0][n], other[n]) for other in found[1:] for n in found[0])
    close(found[0], serial(plan, 4, largest(0.05)))


def test_a_plan_that_compresses_nothing_is_the_plain_plan_and_trains_alike():
    fast = planned("auto", link="100GB/s")
    assert not any(b.codec for b in fast.layout.buckets) and fast.prediction.time_s <= planned(None, link="100GB/s").prediction.time_s
    plan = planned("topk:density=1")
    close(trained(plan, 3)[0], trained(planned(None), 3)[0])


@pytest.mark.parametrize("codec", ["int8", "efsign", "onebit", "qsgd", "terngrad", "fp8"])
def test_every_codec_that_is_gathered_sends_what_it_encodes(codec):
    plan = planned(codec)
    spec = parse_codec(codec)
    made = {}

    def encoded(flat, number, replica, step, memories):
        bucket = plan.layout.buckets[number]
        names = [n for n in plan.layout.stages[0].params if n in bucket.params]
        key = (number, replica)
        if key not in made:
            c = make_codec(spec, [(flat.numel(),)], name=f"group {number} ({names[0]} to {names[-1]})")
            made[key] = (c, c.new_state())
        c, state = made[key]
        out = torch.empty_like(flat)
        c.decode(c.unpack(c.encode(flat, state, At(step=step, rank=replica, world=2)).wire), out)
        return out

    close(trained(plan, 3)[0], serial(plan, 3, encoded), tolerance=2e-5)


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
    return {state_file(Path(), r).name: d for r, (d, _) in enumerate(found)}, sums


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
