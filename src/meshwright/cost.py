"""What an operator or a transfer costs, and how well we know it.

Three kinds of knowledge, kept apart on every number: `measured` (timed here, in place), `interpolated` (from a measured
table), `assumed` (roofline or a preset's figure). A prediction says which share of it is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from .fabric.fabric import Device, Fabric
from .graph.graph import Work

__all__ = ["Cost", "Evidence", "Priced", "RankThread", "Transport", "assumed_cost"]

Evidence = Literal["measured", "interpolated", "assumed"]


class Priced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one operation and the evidence for it. `cpu_s` is processor time when it was measured, else 0."""

    time_s: float
    evidence: Evidence = "assumed"
    cpu_s: float = 0.0


class Transport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Runtime cost of messages on top of the fabric's links (which give rate and latency)."""

    per_message_s: float = 0.0  # occupies the lane of either end, per message
    per_byte_s: float = 0.0  # copies and checks at either end, per byte
    per_step_s: float = 0.0  # the executor's own work per step of any kind
    cpu_per_message_s: float = 0.0  # processor time at either end, whatever the share; 0 = not measured
    cpu_per_byte_s: float = 0.0
    evidence: Evidence = "assumed"


class RankThread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ranks of one thread, as the executor's: what a rank computes, posts, copies and adds takes turns, and nothing of it overlaps."""

    begin_s: float = 0.0  # processor time of a rank before its first action of a training step: fetching micro-batches
    begin_wait_s: float = 0.0  # from when the last of them has begun until all know the sum of what their losses count
    sum_cpu_s: float = 0.0  # processor time of that sum, mostly of other threads of the rank: nobody waits for it, but a quota counts it
    waits_in: tuple[str, ...] = ()  # keys of the ops that compute the loss: the first one of a step does not end before that sum is known


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prices for one job on one kind of device.

    `table` holds known prices by key (`"<op.graph>|<op.name>"`, see `meshwright.program.Ops`); what it lacks is priced by
    roofline: max(flops / (peak · flops_efficiency), bytes / (bandwidth · memory_efficiency)) + calls · per_call_s.
    """

    name: str = "roofline"
    dtype: str = "fp32"
    flops_efficiency: float = 0.6
    memory_efficiency: float = 0.7
    per_call_s: float = 4e-6
    default_flops: float = 1e12  # when a device states no peak for `dtype`
    default_memory_Bps: float = 1e11
    table: dict[str, Priced] = {}
    table_share: float = 0.0  # of a core, at which the table's times hold; 0: of whatever device they are asked for
    transport: Transport = Transport()
    thread: RankThread | msgspec.UnsetType = msgspec.UNSET  # UNSET: lanes of a rank run beside each other
    evidence: Evidence = "assumed"  # of the roofline: "interpolated" once its efficiencies are fitted to a measured table
    source: str = "analytic roofline"

    def roofline(self, work: Work, device: Device) -> Priced:
        return Priced(self._roofline_s(work, device) / (device.cpu_share or 1.0), self.evidence)

    def _roofline_s(self, work: Work, device: Device, compute: float = 1.0, memory: float = 1.0) -> float:
        """On a core that computes and reaches memory at these speeds, of those of one core alone."""
        flops = device.flops.get(self.dtype, self.default_flops) * self.flops_efficiency * compute
        rate = (device.memory_bandwidth_Bps or self.default_memory_Bps) * self.memory_efficiency * memory
        return max(work.flops / flops, (work.bytes_read + work.bytes_written) / rate) + work.calls * self.per_call_s / compute

    def busy_speeds(self, work: Work | None, device: Device) -> tuple[float, ...]:
        """How fast each of 1, 2, ... busy cores of the device's machine does this work, by one core alone: the roofline under both of its
        `cpu_speeds`. Work that is not known computes."""
        compute, memory = (device.cpu_speeds.get(kind, (1.0,)) for kind in ("compute", "memory"))
        busy = range(max(len(compute), len(memory)))
        pairs = [(compute[min(k, len(compute) - 1)], memory[min(k, len(memory) - 1)]) for k in busy]
        alone_s = self._roofline_s(work, device) if work is not None else 0.0
        if work is None or alone_s <= 0.0:
            return tuple(c for c, _ in pairs)
        return tuple(alone_s / self._roofline_s(work, device, c, m) for c, m in pairs)

    def price(self, key: str, work: Work | None, device: Device) -> Priced:
        """The table's price for `key` if there is one, else the roofline of `work` (zero work costs nothing)."""
        known = self.table.get(key)
        if known is not None:
            times = self.table_share / (device.cpu_share or 1.0) if self.table_share else 1.0
            return known if times == 1.0 else Priced(known.time_s * times, known.evidence, known.cpu_s)
        return self.roofline(work, device) if work is not None else Priced(0.0)

    def with_table(self, table: Mapping[str, Priced], *, source: str, transport: Transport | None = None, share: float = 0.0) -> Cost:
        return msgspec.structs.replace(
            self, table={**self.table, **table}, source=source, transport=transport or self.transport, table_share=share or self.table_share
        )


def assumed_cost(fabric: Fabric) -> Cost:
    """The roofline with overheads that fit the fabric's devices when nothing was measured there.

    Processors running eager PyTorch over gloo: about 15 us per operator and 100 us per message (78-200 us at 1 KiB, one loop with
    one outstanding operation). GPUs: about 4 us per kernel launch and 5 us per message, as NCCL's latency figures have it.
    """
    if all(d.kind == "cpu" for d in fabric.devices):
        transport = Transport(per_message_s=1e-4, per_byte_s=2.5e-10, per_step_s=5e-6)
        return Cost(per_call_s=1.5e-5, transport=transport, source="analytic roofline, overheads of eager PyTorch and gloo assumed")
    return Cost(transport=Transport(per_message_s=5e-6), source="analytic roofline, overheads of launches and NCCL assumed")
