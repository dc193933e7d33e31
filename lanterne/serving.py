"""The server as one process: API and page joined on one port, in the foreground or embedded in a thread."""

from __future__ import annotations

import threading
import time
from typing import Any

from lanterne.errors import LanterneError, MissingExtra
from lanterne.settings import ServerSettings

START_S = 30.0


def build_app(settings: ServerSettings) -> Any:
    """The ASGI app of API and page. Raises :class:`MissingExtra` where the server extra is not installed."""
    try:
        import httpx

        from lanterne.backend.app import create_app
        from lanterne.dashboard.app import create_page
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{error.name} is not installed; run: pip install 'lanterne[server]'") from error
    if not settings.dashboard:
        return create_app(settings)

    class Loop(httpx.AsyncBaseTransport):
        """The page's requests to the API: in process, without a socket."""

        inner: httpx.AsyncBaseTransport | None = None

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.inner is None:
                raise httpx.ConnectError("the API is not up yet", request=request)
            return await self.inner.handle_async_request(request)

    loop = Loop()
    page = create_page("http://127.0.0.1", transport=loop)
    app = create_app(settings, page=page)
    loop.inner = httpx.ASGITransport(app=app, client=("127.0.0.1", 0))
    return app


def config(settings: ServerSettings, **more: Any) -> Any:
    """The uvicorn configuration of ``serve`` and of the embedded server."""
    import uvicorn

    return uvicorn.Config(
        build_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        server_header=False,
        ssl_certfile=settings.tls_certificate or None,
        ssl_keyfile=settings.tls_key or None,
        timeout_graceful_shutdown=10,
        **more,
    )


class EmbeddedServer:
    """Serve in a daemon thread of this process; for the demo and for tests."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start and wait until it answers; returns the base URL. Raises LanterneError when it does not come up."""
        import uvicorn

        self._server = uvicorn.Server(config(self.settings))
        self._thread = threading.Thread(target=self._server.run, name="lanterne-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise LanterneError(f"the server did not start on {self.settings.host}:{self.settings.port}")
            time.sleep(0.02)
        return f"http://{self.settings.host}:{self.settings.port}"

    def stop(self) -> None:
        """Stop, draining what was received; waits up to 15 s."""
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(15)
