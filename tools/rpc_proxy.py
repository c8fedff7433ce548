"""A TCP link with a delay that counts its bytes and can be cut, put between a program and a ggml-rpc-server."""
from __future__ import annotations

import queue
import socket
import threading
import time


class Link:
    """Listens on 127.0.0.1:port and forwards to another port there; delay: seconds one way."""

    def __init__(self, target: int, delay: float = 0.0):
        self.target, self.delay = target, delay
        self.sent = self.received = 0            # bytes to the server and from it
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop every connection and accept none from now on."""
        self._listener.close()
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass                             # the other side was faster
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += [near, far]
            for source, sink, way in ((near, far, "sent"), (far, near, "received")):
                line: queue.SimpleQueue = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(source, line, way), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, line), daemon=True).start()

    def _read(self, source: socket.socket, line: queue.SimpleQueue, way: str) -> None:
        data = b"start"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            setattr(self, way, getattr(self, way) + len(data))
            line.put((time.monotonic() + self.delay, data))

    def _write(self, sink: socket.socket, line: queue.SimpleQueue) -> None:
        while True:
            due, data = line.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return
