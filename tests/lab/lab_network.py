"""A small network of its own, built from the text of the commands alone: who is connected, what is shaped, where packets go.

It shares nothing with `meshwright.lab` but the commands' text: `ip` and `tc` lines are read, interpreted and walked as a kernel would.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Namespace:
    interfaces: dict[str, str] = field(default_factory=dict)  # name -> MAC
    up: set[str] = field(default_factory=set)
    addresses: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # interface -> address/prefix
    neighbours: dict[tuple[str, str], str] = field(default_factory=dict)  # (interface, address) -> MAC
    routes: dict[str, dict[str, tuple[str, str]]] = field(default_factory=lambda: defaultdict(dict))  # table -> destination -> (via, interface)
    rules: list[tuple[str, str, str]] = field(default_factory=list)  # (from, to, table)
    bridge: set[str] = field(default_factory=set)
    shapers: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    below: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # what lies below the bucket
    settings: set[str] = field(default_factory=set)


class Network:
    """Reads commands; `path` walks a packet. Anything that it does not know is an error."""

    def __init__(self, text: str) -> None:
        self.spaces: dict[str, Namespace] = {}
        self.cables: dict[tuple[str, str], tuple[str, str]] = {}  # (namespace, interface) -> the other end
        self.helpers: list[list[str]] = []
        for line in text.splitlines():
            self._read(shlex.split(line, comments=True))

    def _read(self, words: list[str]) -> None:
        if words[0] in ("unshare", "mkdir"):
            return
        if "meshwright.lab.relay" in words:
            self.helpers.append(words)
            for job in json.loads(words[3]):
                a, b = (tuple(end) for end in job["ends"])
                self.cables[a], self.cables[b] = b, a
            return
        if "meshwright.lab.aggregators" in words:
            assert json.loads(words[3])["namespace"] in self.spaces
            self.helpers.append(words)
            return
        if words[:3] == ["ip", "netns", "add"]:
            assert words[3] not in self.spaces
            self.spaces[words[3]] = Namespace()
        elif words[:3] == ["ip", "netns", "exec"]:
            assert words[4:6] == ["sysctl", "-qw"]
            self.spaces[words[3]].settings.add(words[6])
        elif words[:3] == ["ip", "link", "add"]:
            given = words[3:]
            ends = given[: given.index("type")], given[given.index("peer") + 1 :]
            (a, b) = [self._interface(dict(zip(end[::2], end[1::2], strict=True))) for end in ends]
            self.cables[a], self.cables[b] = b, a
        elif words[0] == "ip":
            assert words[1] == "-n"
            self._ip(words[2], self.spaces[words[2]], words[3:])
        elif words[0] == "tc":
            assert words[1] == "-n" and words[4:6] in (["add", "dev"], ["replace", "dev"])
            space = self.spaces[words[2]]
            assert words[6] in space.interfaces
            rest = words[7:]
            if rest[0] == "parent":  # below the bucket: a queue, classes, a filter
                assert rest[1] in ("1:1", "2:", "2:1", "2:2")
                space.below[words[6]].append(" ".join([words[3], *rest]))
            elif "tbf" in rest:
                options = rest[rest.index("tbf") + 1 :]
                space.shapers[words[6]].append({"kind": "tbf"} | dict(zip(options[::2], options[1::2], strict=True)))
            else:
                assert rest == ["root", "blackhole"]
                space.shapers[words[6]].append({"kind": "blackhole"})
        else:
            raise AssertionError(words)

    def _interface(self, given: dict[str, str]) -> tuple[str, str]:
        space, name = self.spaces[given["netns"]], given["name"]
        assert name not in space.interfaces and len(name) <= 15
        space.interfaces[name] = given["address"]
        return given["netns"], name

    def _ip(self, name: str, space: Namespace, words: list[str]) -> None:
        what = " ".join(words[:2])
        if what == "link set" and words[-1] == "up":
            assert words[2] in space.interfaces or words[2] == "lo"
            space.up.add(words[2])
        elif what == "link set" and words[3] == "master":
            space.bridge.add(words[2])
        elif what == "link set" and words[3] in ("addrgenmode", "gso_max_size"):
            assert words[2] not in space.up
        elif what == "link set":
            given = dict(zip(words[3::2], words[4::2], strict=True))
            space.interfaces[words[2]] = given["address"]
        elif what == "link add":
            assert words[-2:] == ["type", "bridge"]
            space.interfaces[words[2]] = words[words.index("address") + 1] if "address" in words else f"{name}/{words[2]}"
        elif what == "tuntap add":
            assert words[4:] == ["mode", "tap", "vnet_hdr"]
            space.interfaces[words[3]] = ""
        elif what == "addr add":
            space.addresses[words[4]].append(words[2])
        elif what == "neigh add":
            space.neighbours[words[6], words[2]] = words[4]
        elif what == "route add":
            given = dict(zip(words[3::2], words[4::2], strict=True))
            table = space.routes[given.get("table", "main")]
            assert words[2] not in table
            table[words[2]] = (given["via"], given["dev"])
        elif what == "rule add":
            space.rules.append((words[3], words[5], words[7]))
        else:
            raise AssertionError(words)

    # ---- walking ---------------------------------------------------------------------------------------------------
    def owner(self, address: str) -> str:
        return next(n for n, s in self.spaces.items() for a in s.addresses.values() for x in a if x.partition("/")[0] == address)

    def routed_path(self, src: str, dst: str) -> list[tuple[str, str]]:
        """(namespace, interface) through which a packet between two addresses leaves, hop by hop."""
        here, path = self.owner(src), []
        while not any(x.partition("/")[0] == dst for a in self.spaces[here].addresses.values() for x in a):
            space = self.spaces[here]
            table = next((t for a, b, t in space.rules if (a, b) == (src, dst)), "main")
            via, interface = space.routes[table].get(f"{dst}/32") or space.routes["main"][f"{dst}/32"]
            assert interface in space.up
            path.append((here, interface))
            there, arrives = self.cables[here, interface]
            assert space.neighbours[interface, via] == self.spaces[there].interfaces[arrives]  # the next hop is at the other end
            assert f"{via}/30" in self.spaces[there].addresses[arrives]
            assert arrives in self.spaces[there].up
            here = there
            assert len(path) < 1000, "a loop"
        return path

    def bridged_path(self, src: str, dst: str) -> list[tuple[str, str]]:
        """The same through bridges: every way that a frame can take, of which there must be one."""
        start, goal = self.owner(src), self.owner(dst)
        found: list[list[tuple[str, str]]] = []
        todo: list[tuple[str, list[tuple[str, str]]]] = [(start, [])]
        while todo:
            here, path = todo.pop()
            if here == goal:
                found.append(path)
                continue
            assert len(path) < 100, "a loop of bridges"
            space = self.spaces[here]
            came = self.cables[path[-1]][1] if path else None
            ways = space.bridge if path else {"eth0"}
            if path and not space.bridge:  # another device: it does not forward
                continue
            todo += [(self.cables[here, w][0], [*path, (here, w)]) for w in ways if w != came]
        assert len(found) == 1
        return found[0]
