"""The tool that changes the source: what it offers, what it draws, and its verdicts on a toy package."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))
from mutation import lines, operators, report, rooms, runs

ROOT = Path(__file__).parent.parent.parent


def changed(source: str) -> list[str]:
    """The lines offered instead, stripped."""
    return [made.after.strip() for made in operators.mutations("x.py", textwrap.dedent(source))]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("a = b < c", ["a = b <= c", "a = b >= c"]),
        ("a = (b) == (c)", ["a = (b) != (c)"]),
        ("a = b is not c", ["a = b is c"]),
        ("a = b in c", ["a = b not in c"]),
        ("a = b + c", ["a = b - c"]),
        ("a = b * c", ["a = b // c"]),
        ("a = b and c or d", ["a = b or c or d", "a = b and c and d"]),
        ("a = not b", ["a = b"]),
        ("a = 3", ["a = 2", "a = 4"]),
        ("a = 4096", ["a = 2048", "a = 8192"]),
        ("a = 0.5", ["a = -0.5", "a = 1.5"]),
        ("a = True", ["a = False"]),
        ("a = b[c:]", ["a = b[c + 1:]", "a = b[c - 1:]"]),
        ("a = min(b, c)", ["a = max(b, c)"]),
        ("a = np.maximum(b, c)", ["a = np.minimum(b, c)"]),
        ("a = f(b, c)", ["a = f(c, b)"]),
        ("a = zip(b, c, strict=True)", ["a = zip(c, b, strict=True)"]),
        ("a.b(c)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += c", ["a -= c", "pass"]),
    ],
)
def test_what_a_line_can_become(line: str, offered: list[str]) -> None:
    assert sorted(changed(line)) == sorted(offered)


def test_statements_of_a_function() -> None:
    source = """
        def f(a: int) -> int:
            if a:
                raise ValueError("no")
            for b in a:
                continue
            return a

        def g(a):
            return a.b

        def h(a) -> bool:
            return a.b
    """
    assert changed(source) == ["if not a:", "pass", "pass", "return 0", "return None", "return not (a.b)"]


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 3 lines."""',
        "a: int | None",
        "def f(a: int | None) -> int | None: ...",
        "@dataclass(frozen=True)\nclass A: ...",
        '__all__ = ["a" + "b"]',
        "CITE = cited(1)",
        "Alias = int | None",
        "if TYPE_CHECKING:\n    a = 1",
        "assert a == 1",
        "log.debug('x', 1)",
        "class A:\n    def __repr__(self):\n        return self.a + 1",
        "a = f'{b + 1}'",
        "a = 1  # pragma: no cover",
        "raise ValueError(\n    f(a, 1)\n)",
        "a = PlanError(f(b, 1))",
        "a = b.reshape(-1)",
        "a = (b\n     )",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert changed(source) == []


def test_a_change_is_one_line_and_other_letters_do_not_shift_it() -> None:
    source = 'a = "é", b + c\nd = 1\n'
    made = operators.mutations("x.py", source)
    assert made[0].apply(source) == 'a = "é", b - c\nd = 1\n'
    with pytest.raises(ValueError):
        made[0].apply("another\n")


def test_a_draw_is_by_lines_repeats_and_does_not_depend_on_the_place(tmp_path: Path) -> None:
    body = "".join(f"def f{k}(a, b):\n    return a + b * {k}\n" for k in range(20))
    (tmp_path / "one.py").write_text(body)
    (tmp_path / "moved.py").write_text("import os\n\n\n" + body)
    drawn = operators.draw(tmp_path, ["one.py"], 8, seed=1)
    assert drawn == operators.draw(tmp_path, ["one.py"], 8, seed=1)
    assert len({made.line for made in drawn}) == 8
    moved = operators.draw(tmp_path, ["moved.py"], 8, seed=1)
    assert [(made.scope, made.after) for made in moved] == [(made.scope, made.after) for made in drawn]
    assert [made.line for made in moved] == [made.line + 3 for made in drawn]
    other = operators.draw(tmp_path, ["one.py"], 8, seed=2)
    assert {made.after for made in other} != {made.after for made in drawn}


PROBED = """
    \"\"\"A module.\"\"\"

    from __future__ import annotations

    double = lambda a: a * 2

    def f(a):
        \"\"\"A function.\"\"\"
        if a > 3:
            return 3
        elif (a >
              2):
            def inner():
                return 2
            return inner()
        try:
            return [b for b in (1,)][a]
        except (IndexError,
                KeyError):
            return 0

    @njit
    def g(a):
        return a
"""


def test_probes_see_the_lines_that_run(tmp_path: Path) -> None:
    text = textwrap.dedent(PROBED).lstrip()
    numbers = {line.strip(): number for number, line in enumerate(text.splitlines(), 1)}
    wanted = frozenset(number for line, number in numbers.items() if line not in ('"""A module."""', '"""A function."""'))

    def seen(*given: int) -> set[int]:
        names: dict = {"njit": lambda f: f}
        lines.under("t")
        exec(compile(lines.probed(text, wanted, str(tmp_path), "x.py"), "x.py", "exec", dont_inherit=True), names)
        assert names["f"].__doc__ == "A function." and names["__doc__"] == "A module."
        for a in given:
            names["f"](a)
        return {line for source, line in lines.PROCESS.seen if source == "x.py"}

    try:
        always = {0, *(numbers[line] for line in ("double = lambda a: a * 2", "@njit", "return a", "def f(a):"))}
        assert seen() == set()
        assert seen(4) == always | {numbers["if a > 3:"], numbers["return 3"]}
        tried = {numbers[line] for line in ("try:", "except (IndexError,", "KeyError):", "return [b for b in (1,)][a]")}
        condition = {numbers[line] for line in ("if a > 3:", "elif (a >", "2):")}
        assert seen(0) == always | condition | tried
        assert seen(2) == always | condition | tried | {numbers["return 0"]}
        assert seen(3) == always | condition | {numbers[line] for line in ("def inner():", "return 2", "return inner()")}
    finally:
        lines.PROCESS.forget()


def test_every_decorator_of_kernels_is_known() -> None:
    """A probe in what numba compiles would not compile: the tests that run it would count as if they ran nothing."""
    from meshwright.kernels import compile as compiling

    ways = [name for name in compiling.__all__ if not hasattr(getattr(compiling, name), "py_func") and name != "fingerprint"]
    assert {"kernel", "inlined", "called", "allocating", "helper"} <= {*ways}
    for name in ways:
        assert [m.compiled for m in operators.mutations("x.py", f"@{name}\ndef f(a):\n    a = 1\n")] == [True, True], name


def test_a_kernel_that_other_modules_call_meets_the_tests_of_its_folder(tmp_path: Path) -> None:
    """It has no probe, and its module may have nothing else that is called."""
    path = tmp_path / "src" / "p" / "room" / "k.py"
    path.parent.mkdir(parents=True)
    path.write_text("@kernel\ndef f(a):\n    return a + 1\n")
    bench = object.__new__(runs.Bench)
    bench.root, bench.unreliable = tmp_path, set()
    (made,) = operators.mutations("src/p/room/k.py", path.read_text(), 3)[:1]
    touched = {
        "tests/room/test_b.py::t": {"s": 2.0, "lines": {}}, "tests/far/test_a.py::t": {"s": 3.0, "lines": {made.path: [0]}},
        "tests/far/test_c.py::t": {"s": 1.0, "lines": {}},
    }  # fmt: skip
    assert bench.tests_for(made, touched) == ["tests/room/test_b.py::t", "tests/far/test_a.py::t"]


def test_kernels_are_known_as_compiled() -> None:
    made = operators.mutations("x.py", "@njit(cache=True)\ndef f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 1\n")
    assert {(m.scope, m.compiled) for m in made} == {("f", True), ("g", False)}


SOURCE = """
    import time

    LIMIT = 7

    def bigger(a, b):
        if a > b:
            return a
        return b

    def shifted(a):
        return a + 1

    def unseen(a):
        return a + 2

    def ending(n):
        while n > 0:
            time.sleep(0.01)  # a loop without end waits
            n -= 1
        return n

    def deaf(n):
        while n > 0:
            time.sleep(0.01)  # a loop without end waits
            n -= 1
        return n

    def started(a):
        return a * 3

    def forked(a):
        return a * 5

    def limit():
        return LIMIT
"""
TESTS = """
    import os
    import signal
    import subprocess
    import sys

    import pytest

    from toy import part

    @pytest.fixture(scope="module")
    def kept():
        return part.shifted(1)

    def test_bigger():
        assert part.bigger(1, 2) == part.bigger(2, 1) == 2

    def test_first(kept):
        assert kept

    def test_second(kept):
        assert kept == 2

    def test_ending():
        assert part.ending(3) == 0

    def test_started():
        done = subprocess.run([sys.executable, "-c", "from toy import part; print(part.started(2))"], capture_output=True, text=True)
        assert done.stdout == "6\\n"

    def test_forked():
        pid = os.fork()
        if pid == 0:
            os._exit(part.forked(1))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5

    def test_deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as in compiled code: the limit's signal is not heard
        assert part.deaf(3) == 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def test_limit():
        assert part.limit() == 7

    def test_wrong_anyway():
        assert part.bigger(1, 2) == 1
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in (("src/toy/__init__.py", ""), ("src/toy/part.py", SOURCE), ("tests/test_toy.py", TESTS), ("pyproject.toml", "[tool.pytest]\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def mutant(bench: runs.Bench, before: str, after: str, nth: int = 0) -> operators.Mutation:
    source = (bench.root / "src/toy/part.py").read_text()
    return [m for m in operators.mutations("src/toy/part.py", source) if (m.before.strip(), m.after.strip()) == (before, after)][nth]


def verdict_on(bench: runs.Bench, before: str, after: str, ledger: dict, nth: int = 0, recorded: dict | None = None) -> runs.Verdict:
    """`recorded`: what the tests touch, where that is known."""
    made = mutant(bench, before, after, nth)
    return bench.judge(made, bench.record([made], ["tests/test_toy.py"]) if recorded is None else recorded, ledger)


# Looked for by one recording, as the tool does with all that it has drawn.
DRAWN = [
    ("if a > b:", "if a <= b:"), ("if a > b:", "if a >= b:"), ("return a + 2", "return a + 3"), ("return a + 1", "return a - 1"),
    ("return a * 3", "return None"), ("return a * 5", "return None"), ("LIMIT = 7", "LIMIT = 8"),
]  # fmt: skip


@pytest.mark.interpreter
def test_verdicts_on_a_toy(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, ledger = runs.Bench(toy, imported=("pytest", "_pytest.assertion.rewrite")), {}
    before = {p: p.read_bytes() for p in toy.rglob("*.py") if ".mutation" not in p.parts}
    try:
        touched = bench.record([mutant(bench, *lines_of) for lines_of in DRAWN], ["tests/test_toy.py"])
        smaller = verdict_on(bench, "if a > b:", "if a <= b:", ledger, recorded=touched)
        assert (smaller.verdict, smaller.by, smaller.how) == ("caught", "tests/test_toy.py::test_bigger", "failed")
        assert "fails on the sources as they are: tests/test_toy.py::test_wrong_anyway" in capsys.readouterr().out
        equal = verdict_on(bench, "if a > b:", "if a >= b:", ledger, recorded=touched)
        assert equal.verdict == "survived" and equal.tests >= 1
        assert verdict_on(bench, "return a + 2", "return a + 3", ledger, recorded=touched).verdict == "untouched"
        # a fixture's, by the second test that has it
        assert verdict_on(bench, "return a + 1", "return a - 1", ledger, recorded=touched).verdict == "caught"
        started = verdict_on(bench, "return a * 3", "return None", ledger, recorded=touched)  # in a process of the test
        assert started.by == "tests/test_toy.py::test_started"
        forked = verdict_on(bench, "return a * 5", "return None", ledger, recorded=touched)
        assert (forked.by, forked.how) == ("tests/test_toy.py::test_forked", "failed")  # at once, not by the limit
        assert verdict_on(bench, "LIMIT = 7", "LIMIT = 8", ledger, recorded=touched).by == "tests/test_toy.py::test_limit"  # runs at import
        again = verdict_on(bench, "if a > b:", "if a <= b:", ledger, recorded=touched)
        assert (again.verdict, again.seconds) == ("caught", 0.0)  # the ledger knows
        assert {p: p.read_bytes() for p in toy.rglob("*.py") if ".mutation" not in p.parts} == before
        assert bench.confirm([smaller], {"tests/test_toy.py::test_bigger": {"s": 0.1}}) == []
        (toy / "tests/test_toy.py").write_text("from toy import part\n\ndef test_equal():\n    assert part.bigger(1, 1.0) is not 1\n")
        assert verdict_on(bench, "if a > b:", "if a >= b:", ledger).verdict == "caught"  # a new test is asked
    finally:
        bench.close()


@pytest.mark.interpreter
@pytest.mark.parametrize(("which", "name", "how"), [(0, "ending", "failed"), (1, "deaf", "time ran out")])
def test_a_loop_without_end_is_caught(which: int, name: str, how: str, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "TEST_EXTRA_S", 1.0)
    bench = runs.Bench(toy, imported=("pytest", "_pytest.assertion.rewrite"))
    try:
        ended = verdict_on(bench, "n -= 1", "pass", {}, nth=which)
        assert (ended.by, ended.how) == (f"tests/test_toy.py::test_{name}", how)
    finally:
        bench.close()


def test_the_report_counts_and_gives_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operators.mutations("x.py", "a = b < c\n")
    found = {"check": [runs.Verdict(made[0], "caught", "tests/x.py::t"), runs.Verdict(made[1], "survived", tests=3)]}
    (tmp_path / "e.toml").write_text('[[mutant]]\nscope = ""\nbefore = "a = b < c"\nafter = "a = b >= c"\nreason = "b is c"\n')
    known = report.reasons(tmp_path / "e.toml")
    assert report.reason_of(made[1], known) == "b is c" and not report.reason_of(made[0], known)
    monkeypatch.setattr(report, "reasons", lambda: known)
    rows, left = report.rows(found, 1, "abc"), report.survivors(found, 1)
    assert rows[0]["value"] == 0.5 and rows[0]["at_least"] == 0.9
    text = report.markdown(rows, left, ["Cut after 1 minute."])
    assert "| check | 1 | 1 | 2 | 50% | 90% | 0 | 1 | 0 | abc |" in text and "b is c" in text and "Cut after" in text and "+a = b >= c" in text


def test_what_was_not_run_is_not_caught() -> None:
    made = operators.mutations("x.py", "a = b < c\n")
    found = {"run": [runs.Verdict(made[0], "caught", "tests/x.py::t"), runs.Verdict(made[1], "not run")]}
    rows, left = report.rows(found, 1, "abc"), report.survivors(found, 1)
    assert (rows[0]["value"], rows[0]["drawn"], len(left)) == (0.5, 2, 1)
    assert "not run, counted as not caught" in report.markdown(rows, left)


def test_a_report_keeps_the_rooms_that_were_not_run(tmp_path: Path) -> None:
    record = tmp_path / "mutation.json"
    row, run = {"room": "check", "seed": 2, "value": 0.5}, {("check", 2)}
    assert report.with_other_rooms("rows", [row], run, record, rooms.ROOMS) == [row]
    old = [{"room": room, "seed": seed, "value": 0.9} for room, seed in (("check", 2), ("decide", 1), ("simulate", 1), ("check", 1))]
    record.write_text(json.dumps({"rows": old}))
    assert report.with_other_rooms("rows", [row], run, record, rooms.ROOMS) == [old[3], row, old[2], old[1]]


@pytest.mark.parametrize("room", rooms.ROOMS.values(), ids=rooms.ROOMS)
def test_every_room_has_sources_and_tests(room: rooms.Room) -> None:
    assert len(room.files(ROOT)) >= 5
    for path in room.files(ROOT):
        assert room.tests_of(ROOT, path) or path.endswith("decide/__init__.py")


def test_a_room_knows_the_tests_of_a_part() -> None:
    found = rooms.ROOMS["decide"].tests_of(ROOT, "src/meshwright/decide/pipeline/some.py")
    assert "tests/decide/pipeline" in found and "tests/contract/test_pipeline_contract.py" in found
    assert not [path for path in found if "memory" in path]
