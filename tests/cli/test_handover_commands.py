"""`collective check`, `export` and `import`: exit codes, documents, round trips."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.frame import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """An exported ring: ring.json is our plan, ring.xml the file."""
    plan = tmp_path / "ring.json"
    words = ("--fabric", "two-islands", "--size", "64KiB", "--strategy", "ring", "--pieces", "1", "--out", plan)
    assert run(capsys, "collective", "plan", "all-reduce", *words)[0] == 0
    code, out, _ = run(capsys, "collective", "export", plan, "--out", tmp_path / "ring.xml", "--max-size", "1MiB", "--proto", "LL")
    assert code == 0 and "allreduce for 4 gpus, out of place and in place: 1 blocks per gpu of at most 7 steps, 1 channels" in out
    return tmp_path / "ring.xml"


def test_a_right_file(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "collective", "check", ring)
    assert code == 0
    assert out.splitlines() == [
        "ring.xml: all-reduce among 4 ranks (4 blocks, 28 steps, 1 channels): ok",
        "  judged out of place and in place",
        "  smallest FIFO depth that works: 2 (the executor has 2)",
    ]
    code, out, _ = run(capsys, "collective", "check", ring, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema"] == "meshwright.collective-check" and document["format"] == "msccl-xml" and document["status"] == "ok"
    assert document["facts"]["smallest_fifo"] == 2 and document["op"] == "all-reduce" and document["findings"] == []
    code, out, _ = run(capsys, "collective", "check", ring.with_suffix(".json"))
    assert code == 0 and out.startswith("ring.json: all-reduce among 4 ranks: ok")


def test_a_wrong_file_has_exit_code_four_and_a_witness(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring.write_text(ring.read_text().replace('"rrcs"', '"rcs"', 1))
    code, out, _ = run(capsys, "collective", "check", ring)
    assert code == 4 and "wrong" in out.splitlines()[0] and "gpu 0 tb 0 step 3" in out
    code, out, _ = run(capsys, "collective", "check", ring, "--json")
    document = json.loads(out)
    assert code == 4 and document["status"] == "wrong"
    assert {"gpu", "tb", "step"} <= document["findings"][0]["witness"].keys()
    code, _, err = run(capsys, "collective", "import", ring, "--out", ring.with_name("p.json"))
    assert code == 4 and "error:" in err and not ring.with_name("p.json").exists()


def test_deadlock_and_limits_by_option(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "collective", "check", ring, "--steps", 6)[0] == 4
    assert run(capsys, "collective", "check", ring, "--fifo", 2)[0] == 0
    assert run(capsys, "collective", "check", ring, "--fifo", 1)[0] == 4  # rings of fused steps hold a message while they send the next
    for option in ("--steps", "--fifo"):
        code, _, err = run(capsys, "collective", "check", ring, option, 0)
        assert code == 2 and "must be >= 1" in err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is neither XML nor JSON"),
        (b"hello", "is neither XML nor JSON"),
        (b"<!DOCTYPE a [<!ENTITY x 'y'>]><algo/>", "has a DOCTYPE"),
        (b"<topology/>", "must be an <algo> document"),
        (b'{"schema": "meshwright.plan", "version": 1}', "missing required field"),
    ],
)
def test_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    for words in (("check", path), ("import", path, "--out", tmp_path / "y")):
        if words[0] == "check" or b"meshwright" not in data:
            code, _, err = run(capsys, "collective", *words)
            assert code == 1 and message in err, err
    assert run(capsys, "collective", "check", tmp_path / "none")[0] == 2


def test_import_and_export_of_an_unchanged_plan(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal up to formatting: here the file has another layout, comments and an attribute of its own."""
    from meshwright.io.msccl.xml import parse_msccl

    text = ring.read_text().replace("<gpu ", "<!-- one -->\n\n<gpu ").replace("<algo ", '<algo redop="sum" ').replace("><", ">\n<")
    foreign = ring.with_name("foreign.xml")
    foreign.write_text(text)
    plan, again = ring.with_name("plan.json"), ring.with_name("again.xml")
    code, out, _ = run(capsys, "collective", "import", foreign, "--fabric", "two-islands", "--size", "64KiB", "--out", plan)
    assert code == 0 and "bound" in out
    code, out, _ = run(capsys, "collective", "export", plan, "--out", again, "--json")
    assert code == 0 and json.loads(out)["unchanged_import"]
    assert parse_msccl(again.read_bytes()) == parse_msccl(foreign.read_bytes())
    assert run(capsys, "cite", plan)[1].count("MSCCLang") == 1
    program = ring.with_name("program.json")
    assert run(capsys, "collective", "import", foreign, "--out", program)[0] == 0
    assert run(capsys, "collective", "check", program)[0] == 0
    assert run(capsys, "collective", "export", program, "--out", again)[0] == 0
    assert run(capsys, "collective", "check", again)[0] == 0


def test_wrong_uses(ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ring.with_suffix(".json")
    for words, code, message in (
        (("import", ring), 2, "--out is missing"),
        (("import", ring, "--out", "x", "--fabric", "two-islands"), 2, "--fabric and --size go together"),
        (("import", ring, "--out", tmp_path / "x", "--fabric", "laptop:2", "--size", "4KiB"), 2, "is for 4 gpus, 2 devices are given"),
        (("import", plan, "--out", tmp_path / "x"), 1, "is a plan of meshwright already"),
        (("export", plan, "--out", tmp_path / "x", "--fabric", "laptop:2"), 2, "do not apply to msccl-xml"),
        (("export", ring, "--out", tmp_path / "x"), 1, "becomes one with `meshwright collective import`"),
        (("export", plan, "--out", tmp_path / "x", "--blocks", "0"), 2, "must be >= 1"),
        (("export", plan, "--out", tmp_path / "x", "--min-size", "1MiB", "--max-size", "1KiB"), 2, "is below --min-size"),
        (("export", plan, "--out", tmp_path / "x", "--max-size", "big"), 2, "--max-size"),
        (("export", plan, "--out", tmp_path / "x", "--steps", "1", "--blocks", "1"), 2, "the executor has 1"),
        (("export", "all-reduce", "--format", "nccl-tuner", "--out", tmp_path / "x"), 2, "needs --fabric"),
        (("export", "permute", "--format", "nccl-tuner", "--fabric", "laptop:2", "--out", tmp_path / "x"), 2, "the tuner plugin knows no 'permute'"),
    ):
        got, _, err = run(capsys, "collective", *words)
        assert (got, message in err) == (code, True), (words, got, err)


def test_tuner_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.io.nccl.tuner import first_match, read_tuner

    conf = tmp_path / "nccl_tuner.conf"
    code, out, _ = run(capsys, "collective", "export", "all-reduce", "--format", "nccl-tuner", "--fabric", "dgx-h100:2", "--out", conf)
    assert code == 0 and "ranges of sizes" in out
    rows = read_tuner(conf)
    assert all(first_match(rows, "all-reduce", 1 << k, nodes=2, ranks=16) is not None for k in range(40))
    assert first_match(rows, "all-reduce", 1 << 20, nodes=3, ranks=16) is None
    code, out, _ = run(capsys, "collective", "import", conf, "--format", "nccl-tuner", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == len(rows)
    words = ("--format", "nccl-tuner", "--fabric", "dgx1-v100", "--sizes", "1KiB,16MiB", "--by", "simulation", "--out", conf)
    assert run(capsys, "collective", "export", "all-reduce", *words)[0] == 0
    assert {row.algorithm for row in read_tuner(conf)} <= {"ring", "tree", "pat"}
    conf.write_text("allreduce,0,1,rink,ll,-1,-1,-1\n")
    assert run(capsys, "collective", "import", conf, "--format", "nccl-tuner")[0] == 1


def test_mscclpp_plans(ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, foreign = ring.with_suffix(".json"), tmp_path / "mscclpp.json"
    code, out, _ = run(capsys, "collective", "export", plan, "--format", "mscclpp-json", "--out", foreign)
    assert code == 0 and "allreduce for 4 gpus, out of place: 1 blocks per gpu; checked" in out
    document = json.loads(foreign.read_text())
    kinds = {c["channel_type"] for g in document["gpus"] for c in g["channels"]}
    assert kinds == {"memory", "port"}  # two islands: within one by memory, between them over ports
    code, out, _ = run(capsys, "collective", "check", foreign, "--json")
    assert code == 0 and json.loads(out)["format"] == "mscclpp-json"
    program = tmp_path / "program.json"
    assert run(capsys, "collective", "import", foreign, "--out", program)[0] == 0
    assert run(capsys, "collective", "check", program)[0] == 0
    document["gpus"][0]["threadblocks"][0]["ops"].pop(3)
    foreign.write_text(json.dumps(document))
    code, out, _ = run(capsys, "collective", "check", foreign)
    assert code == 4 and "gpu 0 tb 0 op" in out
    assert run(capsys, "collective", "import", foreign, "--out", program)[0] == 4
    code, _, err = run(capsys, "collective", "import", foreign, "--out", program, "--fabric", "two-islands", "--size", "64KiB")
    assert code == 2 and "from MSCCL XML only" in err
