"""Measure every link of a lab before it is used: a link that misses its rate would make every result wrong.

A transfer per direction, from one end of the cable to the other: TCP, or datagrams on one-way and lossy links. What counts is the
steady rate at the receiver, after two buckets have passed unshaped. It must be within 3 % of the payload's share of the rate (1448
of 1514 bytes with an MTU of 1500: the shaper counts Ethernet, IP and TCP headers and time stamps). A link that misses is measured
again, longer, then with a larger bucket; if that does not help, the lab is refused. So it is when a made delay is off by more than a tenth.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import RunError
from ..io.atomic import write_text
from ..io.fabric.toml import fabric_toml
from ..run.machine.cpu_use import MachineUseRecorder
from .commands import batches, reshape
from .handle import StandingLab

__all__ = ["MAX_RATE_ERROR_SHARE", "calibrate", "ceiling_Bps", "phases"]

MAX_RATE_ERROR_SHARE = 0.03  # by which a link's payload may miss what its rate can pass
MAX_DELAY_ERROR_SHARE = 0.1  # of the declared round trip by which a measured one may miss it, where delays are made
DELAY_NOISE_S = 2e-3  # beyond that share: what waking two processes adds to a round trip
MEASURED_S = 0.25  # of a stream in the first attempt, as much more in each later one
MIN_MEASURED_BYTES = 256 * 1024  # of a stream, however slow the link
MAX_PHASE_Bps = 100_000_000  # links measured at the same moment pass at most this together, where one alone does not
MAX_PHASE_LINKS = 16  # measured at the same moment, two processes each
BUCKETS = (1, 1, 1, 2, 4)  # factors of the bucket, attempt by attempt
TCP_HEADER_BYTES, UDP_HEADER_BYTES = 52, 28  # IPv4 20, TCP 20 and time stamps 12; IPv4 20, UDP 8
ETHERNET_HEADER_BYTES = 14  # what the shaper sees of Ethernet
MAX_PHASE_S = 120.0  # of one phase, beyond what its streams should take


def ceiling_Bps(rate_Bps: int, mtu: int, *, datagrams: bool = False) -> int:
    """The most payload that a link of this rate can pass."""
    return rate_Bps * (mtu - (UDP_HEADER_BYTES if datagrams else TCP_HEADER_BYTES)) // (mtu + ETHERNET_HEADER_BYTES)


def calibrate(lab: StandingLab, *, say: Callable[[str], None] | None = None) -> None:
    """Measure all links, raise buckets where that helps, and write goodputs and buckets into the lab's state and fabric.

    Raises: RunError naming each link that is off and both figures, and how busy the machine was.
    """
    waiting = list(range(len(lab.fabric.links)))
    first_bursts = [s.burst_bytes for s in lab.state.links]
    with MachineUseRecorder(lab.state.holder) as use:
        for attempt, factor in enumerate(BUCKETS):
            if attempt:
                _enlarge(lab, waiting, [first_bursts[i] * factor for i in waiting])
            _measure(lab, phases(lab, waiting), (attempt + 1) * MEASURED_S)
            waiting = [i for i in waiting if _off(lab, i)]
            if say is not None:
                done = len(lab.fabric.links) - len(waiting)
                say(f"measured {done} of {len(lab.fabric.links)} links" + (f"; {len(waiting)} again" if waiting else ""))
            if not waiting:
                break
    lab.state.machine = use.result.to_json()
    if waiting:
        raise _error(lab, waiting, use.result.others)
    lab.state.verified = True
    links = [replace(x, burst_bytes=s.burst_bytes) for x, s in zip(lab.fabric.links, lab.state.links, strict=True)]
    if tuple(links) != lab.fabric.links:
        lab.rewire(replace(lab.fabric, links=tuple(links)))
        write_text(lab.folder / "fabric.toml", fabric_toml(lab.fabric))


def _off(lab: StandingLab, index: int) -> bool:
    link = lab.state.links[index]
    cable, end = lab.wiring.exit_of[index]
    declared_s = link.delay_s + cable.other(end.actor).impairment.delay_s
    late = link.round_trip_s > 0 and abs(link.round_trip_s - declared_s) > _max_delay_error_s(declared_s)
    return late or abs(link.goodput_Bps - link.ceiling_Bps) > MAX_RATE_ERROR_SHARE * link.ceiling_Bps


def _max_delay_error_s(declared_s: float) -> float:
    return MAX_DELAY_ERROR_SHARE * declared_s + DELAY_NOISE_S


def _error(lab: StandingLab, waiting: Sequence[int], others: float) -> RunError:
    names, states = [lab.link_name(i) for i in waiting], [lab.state.links[i] for i in waiting]
    wrong = [{"link": name, "goodput_Bps": s.goodput_Bps, "ceiling_Bps": s.ceiling_Bps} for name, s in zip(names, states, strict=True)]
    shown = "; ".join(
        f"{name} passes {s.goodput_Bps * 8 / 1e6:.4g} Mbit/s of payload instead of {s.ceiling_Bps * 8 / 1e6:.4g}"
        + (f", round trip {s.round_trip_s * 1e3:.3g} ms" if s.delay_s else "")
        for name, s in list(zip(names, states, strict=True))[:4]
    )
    busy = f"; other programs used {others:.0%} of the processors" if others > 0.05 else ""
    return RunError(
        f"{len(wrong)} of {len(lab.fabric.links)} links miss their rate by more than {MAX_RATE_ERROR_SHARE:.0%}: {shown}{busy}",
        where=lab.name, hint="lower the rates (--scale), wait until the machine is idle, or build it without this check (--no-verify)",
        data={"links": wrong, "others": others},
    )  # fmt: skip


def phases(lab: StandingLab, waiting: Iterable[int]) -> list[list[int]]:
    """Links in groups that may be measured at the same moment: no cable twice, and not too much together."""
    found: list[tuple[list[int], set[int], int]] = []
    for index in sorted(waiting, key=lambda i: -lab.fabric.links[i].rate_Bps):
        cable, rate = lab.wiring.exit_of[index][0].number, lab.fabric.links[index].rate_Bps
        for at, (members, cables, total) in enumerate(found):
            if cable not in cables and total + rate <= MAX_PHASE_Bps and len(members) < MAX_PHASE_LINKS:
                members.append(index)
                cables.add(cable)
                found[at] = (members, cables, total + rate)
                break
        else:
            found.append(([index], {cable}, rate))
    return [members for members, _, _ in found]


def _enlarge(lab: StandingLab, links: Sequence[int], bursts: Sequence[int]) -> None:
    commands = []
    for index, burst in zip(links, bursts, strict=True):
        lab.state.links[index].burst_bytes = burst
        commands += list(reshape(lab.wiring, lab.wiring.exit_of[index][1], lab.state.links[index].rate_Bps, burst))
    lab.control.do(list(batches(commands)))


def _measure(lab: StandingLab, groups: Sequence[Sequence[int]], measure_s: float) -> None:
    """One process measures the groups one after the other."""
    run = secrets.token_hex(8)
    jobs = [[_job(lab, index, measure_s) for index in links] for links in groups]
    file = lab.folder / "calibrate.json"
    file.write_text(json.dumps(jobs))
    process = lab.control.start(run, None, [sys.executable, "-m", "meshwright.lab.calibrate_worker", str(file)], _environment(), stdout=-1, stderr=-1)
    try:
        output, errors = process.communicate(timeout=MAX_PHASE_S + 5 * sum(max(j["measured_s"] for j in phase) for phase in jobs))
    finally:
        lab.control.end(run)
        process.close()
        file.unlink(missing_ok=True)
    try:
        results = json.loads(output)
    except ValueError:
        last = errors.decode(errors="replace").strip().splitlines()
        raise RunError("the links could not be measured", where=lab.name, hint=last[-1][:300] if last else "") from None
    for index, result in zip((i for links in groups for i in links), results, strict=True):
        state = lab.state.links[index]
        state.goodput_Bps, state.round_trip_s = round(result["goodput_Bps"]), result["round_trip_s"]
        ceiling = ceiling_Bps(lab.fabric.links[index].rate_Bps, lab.wiring.mtu, datagrams=result["datagrams"])
        state.ceiling_Bps = round(ceiling * (1 - state.loss))


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def _job(lab: StandingLab, index: int, measure_s: float) -> dict[str, Any]:
    """Where one transfer goes from and to, how many bytes do not count, and how many do."""
    cable, end = lab.wiring.exit_of[index]
    far = cable.other(end.actor)
    state = lab.state.links[index]
    measured = max(MIN_MEASURED_BYTES, int(state.rate_Bps * measure_s))
    back_s = far.impairment.delay_s
    window = int(state.rate_Bps * 8 * (state.delay_s + back_s))  # while the sender's window grows to what is under way
    datagrams = far.link is None or state.loss > 0 or far.impairment.loss > 0
    bridged = lab.wiring.style == "bridged"
    return {
        "source": lab.wiring.namespaces[end.actor],
        "target": lab.wiring.namespaces[far.actor],
        "source_address": lab.wiring.address(end.actor) if bridged else end.address,
        "target_address": lab.wiring.address(far.actor) if bridged else far.address,
        "skip_bytes": 2 * state.burst_bytes + window,
        "measured_bytes": measured,
        "measured_s": (measured + 2 * state.burst_bytes + window) / state.rate_Bps + 8 * (state.delay_s + back_s),
        "datagrams": datagrams,
        "pings": far.link is not None,
        "max_round_trip_s": state.delay_s + back_s + _max_delay_error_s(state.delay_s + back_s),
        "segment_bytes": lab.wiring.mtu - UDP_HEADER_BYTES,
    }
