"""Recordings of other versions: what a document leaves out says nothing of the run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from meshwright.run.recording.recording import RankRecording, RestartBytes, StepRecord

REQUIRED: dict[type[msgspec.Struct], dict[str, Any]] = {
    RankRecording: {"rank": 0, "host": "h", "order": [], "steps": []},
    RestartBytes: {},
    StepRecord: {"step": 0, "start_s": 0.0, "end_s": 0.0, "cpu_s": 0.0, "process_cpu_s": 0.0},
}


@pytest.mark.parametrize("kind", REQUIRED)
def test_what_is_left_out_says_nothing(kind: type[msgspec.Struct]) -> None:
    made = msgspec.convert(REQUIRED[kind], kind)
    left_out = [f.name for f in msgspec.structs.fields(kind) if f.name not in (*REQUIRED[kind], "schema", "version")]
    assert left_out and {name: getattr(made, name) for name in left_out if getattr(made, name)} == {}
