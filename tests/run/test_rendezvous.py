"""Ranks meet on a port that nobody can take in between: the socket that was given it is the one that listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from meshwright.errors import PortInUse
from meshwright.run.launcher import listen
from meshwright.run.rendezvous import hosted_rendezvous

RANK = """import torch, torch.distributed as dist
dist.init_process_group("gloo"); x = torch.ones(1); dist.all_reduce(x); print(int(x)); dist.destroy_process_group()"""


def test_the_port_is_taken_from_the_first_moment():
    with hosted_rendezvous(2) as found:
        address = (found["MASTER_ADDR"], int(found["MASTER_PORT"]))
        with pytest.raises(PortInUse):
            listen(address[1])
        with socket.create_connection(address, timeout=5):
            pass  # somebody listens there already


@pytest.mark.real
def test_ranks_meet():
    with hosted_rendezvous(2) as found:
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **found, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
            for r in range(2)
        ]
        assert [p.communicate(timeout=120)[0].strip() for p in ranks] == ["2", "2"]
