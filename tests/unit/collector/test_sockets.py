"""The send queue names the process whose peer does not read."""

from __future__ import annotations

import os
import socket
import time

from lanterne.collector.sources import sockets


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def queue_of(pid: int) -> float:
    return sum(value for name, value, _ in sockets.sample(pid) if name == "system.network.send_queue")


def test_unread_data_piles_up_in_the_senders_queue() -> None:
    left, right = connected()
    with left, right:
        before = queue_of(os.getpid())
        left.setblocking(False)
        try:
            while True:
                left.send(b"x" * 65536)
        except BlockingIOError:
            pass
        piled = queue_of(os.getpid()) - before
        assert piled > 65536
        right.setblocking(False)
        for _ in range(200):
            try:
                while right.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass
            if queue_of(os.getpid()) - before <= 0:
                break
            time.sleep(0.01)
        assert queue_of(os.getpid()) - before < piled


def test_a_process_that_is_gone_gives_nothing() -> None:
    assert sockets.sample(2**22 - 3) == []
