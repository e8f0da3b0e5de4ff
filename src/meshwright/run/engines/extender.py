"""A scheduler extender: kube-scheduler asks over HTTP where a pod may go, and only the node that was decided passes.

POST /filter and /prioritize, with kube-scheduler's ExtenderArgs. Pods that are not ours pass as they are. Pods without gates and without affinity are
thus bound by decisions, too; a scheduler policy names this address with `filterVerb: filter`, `prioritizeVerb: prioritize`, `nodeCacheCapable: true`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from ...errors import FormatError, PortInUse
from ...io.cluster.kubernetes import Asked, parse_asked
from ...io.limits import MaxBytes

__all__ = ["Extender", "answer"]

MAX_SCORE = 10  # kube-scheduler's scale for extenders


def answer(path: str, asked: Asked, decided: Mapping[str, Sequence[str]]) -> object:
    """`decided`: key of a job -> its servers. A job that was not decided gets no node: it waits."""
    ours = bool(asked.key)
    servers = set(decided.get(asked.key, ()))
    allowed = [n for n in asked.nodes if not ours or n in servers]
    if path == "/prioritize":
        return [{"Host": n, "Score": MAX_SCORE if ours and n in servers else 0} for n in asked.nodes]
    why = "meshwright: decided elsewhere" if servers else "meshwright: not decided yet"
    failed = {n: why for n in asked.nodes if n not in set(allowed)}
    return {"NodeNames": allowed, "Nodes": None if asked.named else {"items": [{"metadata": {"name": n}} for n in allowed]}, "FailedNodes": failed,
            "Error": ""}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    decided: Mapping[str, Sequence[str]]

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path not in ("/filter", "/prioritize"):
            return self._say(404, {"Error": f"no {self.path[:64]}; there are /filter and /prioritize"})
        if not length.isdigit() or int(length) > MaxBytes.EXTENDER_BODY:
            self.close_connection = True
            return self._say(413, {"Error": f"a body of at most {MaxBytes.EXTENDER_BODY} bytes"})
        try:
            asked = parse_asked(self.rfile.read(int(length)))
        except FormatError as error:
            return self._say(400, {"Error": str(error)})
        return self._say(200, answer(self.path, asked, self.decided))

    def _say(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Said nowhere."""


class Extender:
    """Serves while it is open; `decided` may change meanwhile. `port`: 0: a free one, found in `.port`. Raises: PortInUse."""

    def __init__(self, decided: Mapping[str, Sequence[str]], *, host: str = "127.0.0.1", port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"decided": decided})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise PortInUse(f"cannot listen: {error.strerror}", where=f"{host}:{port}", hint="name another port") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Extender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
