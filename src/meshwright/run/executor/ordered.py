"""Starting any program in another rank order: who plays which rank is changed before the program starts, the program is not.

An order file (`collective order --save-order`) says which endpoint plays which rank. Launchers that set RANK and WORLD_SIZE per process (`mpirun`
scripts, Slurm scripts, torchrun's workers) get the RANK of the process's endpoint rewritten; torchrun itself gets its `--node-rank`. MASTER_ADDR
follows rank 0, who hosts the store. A host's ranks stay on it and keep their LOCAL_RANK.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...errors import FormatError, UnknownName, UsageError
from ...io.strict_json import decode, header, read_document, refuse_ambiguous, write_document

__all__ = ["LaunchOrder", "is_local", "ordered", "read_order", "write_order"]

SCHEMA, VERSION = "meshwright.launch-order", 1
_HOSTS, _THIS = "order hosts, not single endpoints", "probe and order the hosts of this launch"
_ADDRESS = "order with --probe (which knows addresses), or keep rank 0 with --first"
_RENDEZVOUS = ("c10d", "etcd", "etcd-v2")


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """Endpoints as they were probed; `order[rank]` is the endpoint that plays it. `address`: "" = unknown."""

    names: tuple[str, ...]
    host: tuple[int, ...]
    address: tuple[str, ...]
    order: tuple[int, ...]
    note: str = ""

    def hosts(self) -> list[int]:
        """Hosts in rank order. Raises: UsageError where a host's ranks are not together or not in its own order."""
        found: list[int] = []
        for endpoint in self.order:
            if not found or found[-1] != self.host[endpoint]:
                found.append(self.host[endpoint])
        if len(set(found)) < len(found):
            twice = next(self.names[e] for e in self.order if found.count(self.host[e]) > 1)
            raise UsageError(f"the ranks of {twice}'s host are not together", where="order", hint=_HOSTS)
        for host in found:
            members = [e for e in self.order if self.host[e] == host]
            if members != sorted(members):
                raise UsageError(f"the ranks of {self.names[members[0]]}'s host change places on it", where="order", hint=_HOSTS)
        return found


class _Endpoint(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    host: int
    address: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    endpoints: list[_Endpoint]
    order: list[int]
    note: str = ""


def write_order(path: str | os.PathLike[str], order: LaunchOrder) -> None:
    endpoints = [{"name": n, "host": h, "address": a} for n, h, a in zip(order.names, order.host, order.address, strict=True)]
    document = {"schema": SCHEMA, "version": VERSION, "note": order.note, "endpoints": endpoints, "order": list(order.order)}
    write_document(path, json.dumps(document, indent=1).encode() + b"\n")


def read_order(path: str | os.PathLike[str]) -> LaunchOrder:
    """Raises: UsageError (cannot be read), FormatError naming the field."""
    where = Path(path).name
    data = read_document(path, limit=16 << 20)
    header(data, schema=SCHEMA, version=VERSION, where=where)
    file = decode(data, msgspec.json.Decoder(_File), where)
    refuse_ambiguous(data, where)
    names = [e.name for e in file.endpoints]
    if not names or len(set(names)) < len(names) or not all(names):
        raise FormatError("must be endpoints with names of their own", where=f"{where}: endpoints")
    if sorted(file.order) != list(range(len(names))):
        raise FormatError(f"must hold every endpoint 0..{len(names) - 1} once", where=f"{where}: order")
    return LaunchOrder(
        names=tuple(names), host=tuple(e.host for e in file.endpoints), address=tuple(e.address for e in file.endpoints), order=tuple(file.order),
        note=file.note,
    )  # fmt: skip


def is_local(address: str) -> bool:
    """Whether this machine (this network namespace) has the address: only then can a socket be bound to it."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def ordered(
    order: LaunchOrder, argv: Sequence[str], env: Mapping[str, str], *, me: str | None = None, local: Callable[[str], bool] = is_local
) -> tuple[list[str], dict[str, str]]:
    """(command, environment) for this process in the order. `me`: the endpoint's name, where it cannot be told from addresses.

    Raises: UsageError (another world size or other hosts than the order's, no RANK, a rendezvous that assigns ranks itself), UnknownName.
    """
    if not argv:
        raise UsageError("there is nothing to run", hint="meshwright run ordered --order order.json -- python train.py")
    hosts = order.hosts()
    start = _torchrun(argv)
    if start:
        endpoint = _myself(order, {}, me or env.get("MESHWRIGHT_DEVICE"), local)
        return _ordered_torchrun(order, hosts, argv, start, endpoint), dict(env)
    for name in ("RANK", "WORLD_SIZE"):
        if not env.get(name, "").isdigit():
            text = f"{name} is {env[name]!r}, not a number" if name in env else f"{name} is not set"
            raise UsageError(text, hint="start it under a launcher that sets RANK and WORLD_SIZE, or wrap torchrun itself")
    if int(env["WORLD_SIZE"]) != len(order.names):
        text = f"the order is for {len(order.names)} ranks, this launch has WORLD_SIZE={env['WORLD_SIZE']}"
        raise UsageError(text, where="order", hint=_THIS)
    endpoint = _myself(order, env, me or _known(order, env.get("MESHWRIGHT_DEVICE")), local)
    return list(argv), dict(env) | _ranks(order, hosts, endpoint, env)


def _known(order: LaunchOrder, name: str | None) -> str | None:
    """A lab says on which device a process runs; with several ranks on it the device's name is not an endpoint's."""
    return name if name in order.names else None


def _myself(order: LaunchOrder, env: Mapping[str, str], me: str | None, local: Callable[[str], bool]) -> int:
    """Which endpoint this process is: by name, by the addresses that this machine has, or by the RANK it was given."""
    if me is not None:
        if me not in order.names:
            raise UnknownName(f"the order has no endpoint {me!r}", where="--as", hint=f"endpoints: {', '.join(order.names[:8])}")
        return order.names.index(me)
    if all(order.address):
        here = [e for e, address in enumerate(order.address) if local(address)]
        if not here:
            shown = ", ".join(dict.fromkeys(order.address[:8]))
            raise UsageError(f"this machine has none of the order's addresses ({shown})", where="order", hint=_THIS)
        rank, at = int(env.get("RANK", "-1")), int(env.get("LOCAL_RANK", "0"))
        if rank in here and len(here) == len(order.names):  # all on one machine: nothing to tell them apart by but their ranks
            return rank
        if at >= len(here):
            text = f"LOCAL_RANK is {at}, but the order has {len(here)} endpoints on this machine"
            raise UsageError(text, where="order", hint="as many processes per host as were probed")
        return here[at]
    if "RANK" not in env:
        raise UsageError("the order has no addresses to tell this host by", where="order", hint="say which endpoint this is: --as NAME")
    return int(env["RANK"])


def _ranks(order: LaunchOrder, hosts: list[int], endpoint: int, env: Mapping[str, str]) -> dict[str, str]:
    rank = order.order.index(endpoint)
    found = {"RANK": str(rank)}
    own = [e for e in order.order if order.host[e] == order.host[endpoint]]
    if "LOCAL_RANK" in env and int(env["LOCAL_RANK"]) != own.index(endpoint):
        text = f"{order.names[endpoint]} is number {own.index(endpoint)} on its host, but LOCAL_RANK is {env['LOCAL_RANK']}"
        raise UsageError(text, where="order", hint="start the processes of a host in the order in which they were probed")
    if "LOCAL_WORLD_SIZE" in env and int(env["LOCAL_WORLD_SIZE"]) != len(own):
        text = f"the order has {len(own)} endpoints on {order.names[endpoint]}'s host, but LOCAL_WORLD_SIZE is {env['LOCAL_WORLD_SIZE']}"
        raise UsageError(text, where="order", hint="as many processes per host as were probed")
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in env:
            found[name] = str(hosts.index(order.host[endpoint]))
    first = order.order[0]
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return found  # the agent hosts the store, whoever is rank 0
    if order.address[first]:
        found["MASTER_ADDR"] = order.address[first]
    elif first != 0:
        text = f"rank 0 is {order.names[first]} now and hosts the store, but the order has no address for it"
        raise UsageError(text, where="order", hint=_ADDRESS)
    return found


def _torchrun(argv: Sequence[str]) -> int:
    """Number of words that start torchrun; 0 if they do not."""
    if Path(argv[0]).name == "torchrun":
        return 1
    modules = ("torch.distributed.run", "torch.distributed.launch")
    return 3 if len(argv) > 2 and Path(argv[0]).name.startswith("python") and argv[1] == "-m" and argv[2] in modules else 0


def _ordered_torchrun(order: LaunchOrder, hosts: list[int], argv: Sequence[str], start: int, endpoint: int) -> list[str]:
    options, kept, at = dict[str, str](), list[str](), start
    while at < len(argv) and argv[at].startswith("-"):  # torchrun's own options end where the script begins
        name, equals, value = argv[at].partition("=")
        key = name.lstrip("-").replace("_", "-")
        words = 1 if equals or key in _FLAGS or name in ("-m", "--module") else 2
        if name in ("-m", "--module", "--no-python"):
            break
        options[key] = value if equals else argv[at + 1] if at + words <= len(argv) and words == 2 else ""
        if key not in ("node-rank", "master-addr"):
            kept += argv[at : at + words]
        at += words
    per_host = {sum(order.host[e] == h for e in order.order) for h in hosts}
    if options.get("rdzv-backend") in _RENDEZVOUS or "standalone" in options:
        backend = options.get("rdzv-backend", "--standalone")
        hint = "use --master-addr and --master-port, or wrap the workers: torchrun ... --no-python meshwright run ordered --order FILE -- COMMAND"
        raise UsageError(f"torchrun's {backend} rendezvous gives out node ranks by itself", where="torchrun", hint=hint)
    if options.get("nnodes", "1") != str(len(hosts)):
        text = f"the order is for {len(hosts)} hosts, torchrun has --nnodes={options.get('nnodes', '1')}"
        raise UsageError(text, where="order", hint=_THIS)
    workers = options.get("nproc-per-node", "1")
    if {str(k) for k in per_host} != {workers}:
        text = f"the order has {'/'.join(map(str, sorted(per_host)))} endpoints per host, torchrun has --nproc-per-node={workers}"
        raise UsageError(text, where="order", hint="as many processes per host as were probed, in a number")
    address = order.address[order.order[0]]
    if not address:
        if order.host[order.order[0]] != order.host[0] or "master-addr" not in options:
            text = f"node 0 is {order.names[order.order[0]]}'s host and hosts the store, but the order has no address for it"
            raise UsageError(text, where="order", hint=f"{_ADDRESS} and give --master-addr")
        address = options["master-addr"]
    own = hosts.index(order.host[endpoint])
    return [*argv[:start], "--node-rank", str(own), "--master-addr", address, *kept, *argv[at:]]


_FLAGS = frozenset({"standalone", "no-python", "run-path", "signals-to-handle-help", "help", "virtual-local-rank", "m", "module"})
