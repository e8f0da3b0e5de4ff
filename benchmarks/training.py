"""Unmodified PyTorch training on our backend and on gloo, in the lab with one slow node (400/400/400/100 Mbit/s).

Run: `python benchmarks/training.py` (root or user namespaces; about four minutes). The example GPT with 12.6 MB of gradients: parameters after four
steps must be equal within 1e-6, no planned collective may end up on gloo, and a DDP step is to be 1.25 times faster.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine
from executed import star

EXCUSED = ("no elements", "operator and type", "one rank", "below", "the built-in backend is predicted")  # no plan was made, or gloo was chosen


def main() -> None:
    from meshwright.io.fabric.toml import fabric_toml
    from meshwright.lab import Lab

    found: list[dict[str, Any]] = []

    def sink(rank: int, line: bytes) -> None:
        text = line.decode(errors="replace")
        if rank == 0 and text.startswith('{"row"'):
            found.append(json.loads(text)["row"])
        elif rank == 0 and "arn" not in text:
            sys.stderr.write(text)

    with Lab.up(star(400, 400, 400, 100)) as lab, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured.toml")
        path.write_text(fabric_toml(lab.measured_fabric))
        lab.run([sys.executable, str(Path(__file__).with_name("training_worker.py"))], env={"MESHWRIGHT_FABRIC": str(path)}, sink=sink)
    rows = []
    for row in found:
        gain = row["gloo_s"] / row["ours_s"]
        asked = {"limit": 1.25, "ratio": round(gain / 1.25, 3)} if row["way"].startswith("DDP") else {}
        rows.append({"what": f"{row['way']}: step over gloo's", "value": round(gain, 3), "unit": "x", "higher_is_better": True, **asked, "raw": row})
        rows.append({"what": f"{row['way']}: parameters apart after four steps", "value": row["parameters_apart"], "unit": "", "limit": 1e-6})
        escaped = sum(count for why in row["report"]["builtin"].values() for reason, count in why.items() if not reason.startswith(EXCUSED))
        planned = sum(count for how in row["report"]["planned"].values() for count in how.values())
        rows.append({"what": f"{row['way']}: planned collectives that ended on gloo", "value": escaped, "unit": "", "planned": planned})
    for row in rows:
        print(f"{row['what']:<60} {row['value']:>12.6g} {row['unit']} {'(asked ' + str(row['limit']) + ')' if 'limit' in row else ''}")
    machine.record("training", rows)


if __name__ == "__main__":
    main()
