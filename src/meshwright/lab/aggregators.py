"""The switches of a lab that can add: a process each, in the switch's namespace, which sums what workers send it (`run.aggregate`)."""

from __future__ import annotations

import json
import os
import sys

from ..fabric.fabric import Switch
from . import namespaces as ns
from .batches import HERE
from .wiring import Wiring

__all__ = ["AGGREGATORS_VARIABLE", "PORT", "aggregator_commands", "aggregators_of"]

AGGREGATORS_VARIABLE = "MESHWRIGHT_AGGREGATORS"  # of a process in the lab: SWITCH=HOST:PORT, with commas between
PORT = 48864  # 0xBEE0, the first of the paper's
SLOTS, WORDS = 1024, 256  # of each switch that does not state its memory: 2 MiB of sums
SLOT_BYTES = 2 * 4 * WORDS  # two turns of a packet's numbers


def _adds(switch: Switch) -> bool:
    return switch.aggregate and (not switch.aggregate_bytes or switch.aggregate_bytes >= SLOT_BYTES)


def _able(wiring: Wiring) -> list[int]:
    """Actors: switches that add and that some cable reaches."""
    devices = len(wiring.fabric.devices)
    return [devices + i for i, s in enumerate(wiring.fabric.switches) if _adds(s) and wiring.namespaces[devices + i]]


def aggregator_commands(wiring: Wiring) -> list[list[str]]:
    """The processes, as commands; none where no switch can add."""
    hosts = {actor: wiring.address(actor) if wiring.style == "bridged" else "0.0.0.0" for actor in _able(wiring)}
    states = [s.aggregate_bytes // SLOT_BYTES if s.aggregate_bytes else SLOTS for s in wiring.fabric.switches]
    slots = {actor: states[actor - len(wiring.fabric.devices)] for actor in hosts}
    jobs = [{"namespace": wiring.namespaces[actor], "host": host, "slots": slots[actor]} for actor, host in hosts.items()]
    return [[sys.executable, "-m", "meshwright.lab.aggregators", json.dumps(job)] for job in jobs]


def aggregators_of(wiring: Wiring, device: int) -> dict[str, str]:
    """By switch, the address under which a device reaches it. Where cables are networks of their own, only the device's own switches have one."""
    found = {}
    for actor in _able(wiring):
        name = wiring.fabric.actor_names[actor]
        if wiring.style == "bridged":
            found[name] = f"{wiring.address(actor)}:{PORT}"
            continue
        ends = [cable.other(device) for cable in wiring.cables_of[device] if cable.other(device).actor == actor]
        if ends:
            found[name] = f"{ends[0].address}:{PORT}"
    return found


def main() -> None:
    from ..run.aggregate.process import run_aggregator
    from ..run.aggregate.sockets import Address

    job = json.loads(sys.argv[1])
    place = os.open(HERE / job["namespace"], os.O_RDONLY)
    ns.setns(place, ns.NEWNET)
    os.close(place)

    def ready(_: object) -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        os.dup2(2, 1)  # the lab's log

    run_aggregator(Address(job["host"], PORT), slots=job["slots"], words=WORDS, ready=ready)


if __name__ == "__main__":
    main()
