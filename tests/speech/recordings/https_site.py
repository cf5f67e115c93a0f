"""An https server of this machine, for tests of downloads."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Site:
    """An https server of this machine: what it answers by path, and what it was asked."""

    url: str
    ca_file: Path
    answers: dict[str, bytes | Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def redirect(to: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.end_headers()

    return answer


def _handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append(self.path)
            answer = site.answers.get(self.path.partition("?")[0])
            if answer is None:
                self.send_error(404)
            elif isinstance(answer, bytes):
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            else:
                answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that breaks off, or trusts us not, is part of the tests."""


@contextlib.contextmanager
def serving(certificates: Path) -> Iterator[Site]:
    """Serve with the certificate of a folder with ``ca.pem, certificate.pem, key.pem``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "certificate.pem", certificates / "key.pem")
    server = _QuietServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site = Site(f"https://127.0.0.1:{server.server_address[1]}", certificates / "ca.pem")
    server.RequestHandlerClass = _handler(site)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()
