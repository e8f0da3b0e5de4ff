"""The file of published runs: what is in it, that its halves stay what they are, and what is refused."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_have_sources_and_halves():
    document = loaded("published_rows").read_rows(BENCHMARKS / "published.toml")
    assert len(document["run"]) >= 40
    assert all(re.match(r"https://", s["url"]) and re.match(r"\d{4}-\d\d-\d\d$", s["date"]) for s in document["source"])
    held_out = loaded("published_price").held_out
    halves = [held_out(r["name"]) for r in document["run"]]
    assert 0.4 < sum(halves) / len(halves) < 0.6
    assert held_out("llama3-405b-x16384") and not held_out("megatron-2021-18b")  # a choice once made by hash stays


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("devices = 512\n", "devices = 511\n", "degrees"), ("tokens_per_s_gpu = ", "step_s = 1\ntokens_per_s_gpu = ", "one speed"),
        ('cluster = "h100"', 'cluster = "h1"', "no cluster"), ("global_batch = 4096", "global_batch = 4095", "do not divide"),
        ("sequence = 2048", "sequence = 0", "count"), ("sharding = 3", "sharding = 7", "sharding"), ("sharding = 3", "shards = 3", "unknown field"),
        ("layers = 24", "layers = 99999999999", "sizes"), ('flops = "megatron-2021"', "", "formula"), ("[[run]]", "[[run", "published.toml"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(tmp_path, old, new, what):
    text = (BENCHMARKS / "published.toml").read_text()
    assert old in text
    path = tmp_path / "published.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=what):
        loaded("published_rows").read_rows(path)


def test_too_large_and_twice(tmp_path):
    rows, path = loaded("published_rows"), tmp_path / "published.toml"
    text = (BENCHMARKS / "published.toml").read_text()
    path.write_text(text + "#" * rows.MAX_FILE_BYTES)
    with pytest.raises(ValueError, match="larger than"):
        rows.read_rows(path)
    last = text[text.rindex("[[run]]") :]
    path.write_text(text + "\n" + last)
    with pytest.raises(ValueError, match="second row"):
        rows.read_rows(path)
