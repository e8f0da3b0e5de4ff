"""Ray as the engine (2.60): a job is a placement group with a bundle per server, each pinned to its node by the node's id, and a task per bundle
that runs the launcher.

Making the group reserves its bundles, so a job that is held has its GPUs already. Ray picks the numbers of GPUs within a node; memory is in its books
only. Groups and tasks end with the process that made them; the journal takes them up as lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...cluster.allocation import Given
from ...cluster.servers import STEPS_PER_GPU, Server, Servers
from ...errors import EngineAway, Infeasible, MissingExtra, Unsupported, UsageError
from .interface import UNKNOWN, Seen, Work

__all__ = ["NAME", "Ray"]

NAME = "meshwright.dev/name"  # label of a node whose host name is not its own
NODE_ID = "ray.io/node-id"
MAX_WAIT_S = 30.0  # until a group that can be is there; one that cannot is known at once


class Ray:
    """`address`: of the cluster, default the one of this machine. Raises: MissingExtra without the package; UsageError where no cluster is."""

    name: ClassVar[str] = "ray"
    picks_gpus: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    launches: ClassVar[bool] = False

    def __init__(self, *, address: str = "auto") -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtra("ray", extra="ray", needed_for="the engine Ray") from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray: Any = ray
        self.notes: list[str] = []
        self.said: list[str] = []
        self._groups: dict[str, Any] = {}
        self._tasks: dict[str, list[Any]] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._over: dict[str, Seen] = {}
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UsageError(f"there is no Ray at {address}: {error}", where="--address", hint="ray start --head, or name an address") from None

    def _look_at_nodes(self) -> None:
        found: dict[str, dict[str, Any]] = {}
        for node in self.ray.nodes():
            name = (node.get("Labels") or {}).get(NAME) or node.get("NodeName") or node["NodeID"]
            found[name if name not in found else f"{name}-{node['NodeID'][:8]}"] = node
        self._nodes = found

    def discover(self) -> Servers:
        self._look_at_nodes()
        servers = []
        for name, node in self._nodes.items():
            has = node.get("Resources") or {}
            gpus, cores, memory = int(has.get("GPU", 0)), int(has.get("CPU", 0)), int(has.get("memory", 0))
            if node.get("Alive") and gpus and cores and memory >= STEPS_PER_GPU * gpus:
                servers.append(Server(name=name, gpus=tuple(f"{name}g{k}" for k in range(gpus)), cores=cores, memory_bytes=memory))
        if not servers:
            raise UsageError("no node of this Ray has GPUs", where="--engine ray", hint="ray start --num-gpus 8")
        return Servers(servers=tuple(servers), fabric="ray")

    def addresses(self, servers: Sequence[str]) -> Mapping[str, str]:
        return {s: str(self._nodes[s]["NodeManagerAddress"]) for s in servers if s in self._nodes}

    def down(self) -> set[str]:
        self._look_at_nodes()
        return {name for name, node in self._nodes.items() if not node.get("Alive")}

    def remember(self, ids: Sequence[str]) -> None:
        """Names are never used again here."""

    def hold(self, work: Work) -> tuple[str, ...]:
        """Raises: Infeasible at once for a group that no nodes can ever hold; EngineAway where they cannot hold it now."""
        if work.key in self._groups or work.key in self._over:
            return (work.key,)
        bundles = [{"GPU": len(g.gpus), "CPU": g.cores, "memory": g.memory_bytes} for g in work.placed.given]
        pins = [{NODE_ID: str(self._nodes[g.server]["NodeID"])} for g in work.placed.given]
        group = self.ray.util.placement_group(bundles, strategy="PACK", name=work.key, bundle_label_selector=pins)
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            table = self.ray.util.placement_group_table(group)
            if table["state"] == "CREATED":
                self._groups[work.key] = group
                return (work.key,)
            infeasible = table["stats"]["scheduling_state"] == "INFEASIBLE"
            if infeasible or time.monotonic() > deadline:
                self.ray.util.remove_placement_group(group)
                what = ", ".join(f"{len(g.gpus)} GPUs and {g.cores} cores on {g.server}" for g in work.placed.given)
                if infeasible:
                    raise Infeasible(f"no nodes of this Ray can hold {what}", where=f"job {work.placed.job}",
                        hint="decide for the nodes that are there",
                        data={"bundles": [{k: int(v) for k, v in b.items()} for b in bundles]})  # fmt: skip
                raise EngineAway(f"{what} are not free", where=f"job {work.placed.job}")
            time.sleep(0.01)

    def start(self, works: Sequence[Work]) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        launch = self.ray.remote(subprocess.call)  # by the name of a function that every node has: nodes need no meshwright
        for work in works:
            if work.key in self._tasks or work.key in self._over:
                continue
            group, tasks = self._groups[work.key], []
            for n, g in enumerate(work.placed.given):
                pinned = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=n)
                task = launch.options(num_gpus=len(g.gpus), num_cpus=g.cores, scheduling_strategy=pinned, max_retries=0)
                words = [sys.executable, "-S", "-E", str(work.node), str(work.folder), str(work.placed.attempt), g.server]
                tasks.append(task.remote(words))
            self._tasks[work.key] = tasks

    def look(self, works: Sequence[Work]) -> list[Seen]:
        return [self._seen(work) for work in works]

    def _seen(self, work: Work) -> Seen:
        if work.key in self._over:
            return self._over[work.key]
        if work.key not in self._groups:
            return Seen("gone")
        table = self.ray.util.placement_group_table(self._groups[work.key])
        names = {node["NodeID"]: name for name, node in self._nodes.items()}
        given = []
        for n, bundle in sorted(table["bundles"].items()):
            server = names.get(table["bundles_to_node_id"].get(n, ""), "")
            gpus = tuple(f"{UNKNOWN}{k}" for k in range(int(bundle.get("GPU", 0))))
            given.append(Given(job=work.placed.job, server=server, gpus=gpus, cores=int(bundle.get("CPU", 0)), memory_bytes=int(bundle.get("memory",
                0))))
        tasks = self._tasks.get(work.key)
        if tasks is None:
            return Seen("held", tuple(given))
        done, running = self.ray.wait(tasks, num_returns=len(tasks), timeout=0)
        codes = [self._code(t) for t in done]
        if running and not any(codes):
            return Seen("running", tuple(given))
        self.cancel(work)
        self._over[work.key] = Seen("failed" if any(codes) else "done", tuple(given), max(codes, default=0))
        return self._over[work.key]

    def _code(self, task: Any) -> int:
        try:
            return int(self.ray.get(task))
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            self.notes.append(f"a task ended: {lines[-1][:200]}")
            return 1

    def leave(self, work: Work) -> None:
        """The launchers of its tasks see it; a group without tasks is given back at once."""
        work.ask()
        if work.key not in self._tasks:
            self.cancel(work)

    def cancel(self, work: Work) -> None:
        work.ask()  # tasks are killed, and launchers would outlive them
        for task in self._tasks.pop(work.key, []):
            self.ray.cancel(task, force=True)
        group = self._groups.pop(work.key, None)
        if group is not None:
            self.ray.util.remove_placement_group(group)

    def suspend(self, work: Work) -> None:
        raise Unsupported("Ray does not suspend tasks", where=f"job {work.placed.job}", hint="cancel it and place it again")

    def resume(self, work: Work) -> None:
        raise Unsupported("Ray does not suspend tasks", where=f"job {work.placed.job}", hint="place it again")

    def resize(self, work: Work, given: tuple[Given, ...]) -> None:
        raise Unsupported("bundles of a placement group keep their size", where=f"job {work.placed.job}", hint="use an allocation that keeps them")

    def close(self) -> None:
        for key in list(self._groups):
            for task in self._tasks.pop(key, []):
                self.ray.cancel(task, force=True)
            self.ray.util.remove_placement_group(self._groups.pop(key))
