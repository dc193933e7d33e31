"""A real HTTP server on a free port that takes what alerts are sent to it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Keeps the bodies and headers that came; answers ``status`` (taken from a list first)."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = outer.answers.pop(0) if outer.answers else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("location", outer.url)
                self.end_headers()
                outer.got.append(({k.lower(): v for k, v in self.headers.items()}, body))

            def log_message(self, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def bodies(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 20
        while len(self.got) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return [json.loads(body) for _, body in self.got]
