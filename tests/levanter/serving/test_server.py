"""A server at an address: what comes while it is busy."""

import socket
import threading
from urllib.parse import urlsplit

from levanter.serving.metrics import RequestRejected


def test_who_comes_while_the_server_is_busy_waits_and_is_not_turned_away(server):
    """What is wrong is counted by the thread that answers; while it stands still, hundreds connect and are answered."""
    stands, goes_on, seen = threading.Event(), threading.Event(), []

    def observe(event) -> None:
        if isinstance(event, RequestRejected):
            seen.append(threading.current_thread().name)
            if len(seen) == 1:
                stands.set()
                assert goes_on.wait(200)

    server.service.observers.append(observe)
    wrong = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    where = urlsplit(server.url)
    clients = []
    try:
        for n in range(200):
            # The kernel tries again after a second where there is no room: nobody may need that.
            clients.append(socket.create_connection((where.hostname, where.port), timeout=200 if n == 0 else 0.9))
            clients[-1].settimeout(200)
            clients[-1].sendall(wrong)
            if n == 0:
                assert stands.wait(200)
        goes_on.set()
        for client in clients:
            assert client.recv(65536).startswith(b"HTTP/1.1 404")
    finally:
        goes_on.set()
        server.service.observers.remove(observe)
        for client in clients:
            client.close()
    assert set(seen) == {server.thread.name} and len(seen) == 200
