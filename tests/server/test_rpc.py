"""A model over two ggml-rpc-servers on this machine: every type as without them, other builds refused, a cut link an error."""
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
from pathlib import Path

import architectures
import numpy as np
import pytest
from test_server import Server, completion

from pykvq.launch import executable
from pykvq.native import NativeError, library

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from rpc_proxy import Link                       # noqa: E402

TYPES = ["f16", "turbo2", "turbo3", "turbo4", "turbo4-turbo2", "q8_0-turbo3"]


def has_rpc():
    try:
        return bool(library("ggml-rpc"))
    except NativeError:
        return False


pytestmark = pytest.mark.skipif(not has_rpc(), reason="built without the RPC backend")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rpc_server(folder):
    """Port and process of a ggml-rpc-server that offers the CPU."""
    port, log = free_port(), (folder / "log").open("w")
    return port, subprocess.Popen([executable("ggml-rpc-server"), "-p", str(port), "-t", "1", "-d", "CPU"], stdout=log, stderr=log)


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    """Two ggml-rpc-servers that offer the CPU."""
    running = [rpc_server(tmp_path_factory.mktemp("rpc")) for _ in range(2)]
    for port, process in running:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
    yield [port for port, _ in running]
    for _, process in running:
        process.terminate()
        process.wait(30)


def logits(model, folder, servers):
    out = folder / "logits.npz"
    subprocess.run([sys.executable, Path(__file__).with_name("rpc_logits.py"), model, out, servers, *TYPES], check=True, timeout=300)
    return dict(np.load(out))


def test_two_servers_answer_as_this_machine(ports, tiny_model, tmp_path):
    model = tiny_model(64, layers=4)
    here = logits(model, tmp_path, "")
    there = logits(model, tmp_path, ",".join(f"127.0.0.1:{port}" for port in ports))
    for name in TYPES:
        assert len(there[name + " device"]) == 2 and all("RPC" in device for device in there[name + " device"])
        for what in (name, name + " shifted"):
            # sums in another order, which a quantiser may amplify
            assert np.linalg.norm(there[what] - here[what]) < 0.02 * np.linalg.norm(here[what]), what
        assert np.linalg.norm(there[name] - here["f16"]) < 0.6 * np.linalg.norm(here["f16"])


def other_server(version):
    """A server that answers the first message with this protocol version, and any other with garbage."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        client, _ = listener.accept()
        client.recv(1 << 12)
        client.sendall(struct.pack("<Q4B24x", 28, *version, 0))
        while client.recv(1 << 12):
            client.sendall(b"\x07" * 64)
    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize("what, words", [
    (lambda: f"127.0.0.1:{other_server((7, 0, 0))}", "speaks protocol 7.0, not 107.0; it does not know the cache types of this build: start"),
    (lambda: f"127.0.0.1:{other_server((108, 0, 0))}", "speaks protocol 108.0, not 107.0; start the ggml-rpc-server of this build there"),
    (lambda: f"127.0.0.1:{free_port()}", "cannot be reached"),
    (lambda: "nonsense", "is no HOST:PORT")])
def test_unfit_server_is_refused_by_name(tiny_model, what, words):
    endpoint = what()
    refused = subprocess.run([executable("llama-cli"), "-m", tiny_model(64), "--rpc", endpoint, "-p", "x"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1               # an abort would be negative
    assert f"RPC server {endpoint} {words}" in refused.stderr
    script = f"from pykvq.engine import quiet_log\nfrom pykvq.rpc import add_servers\nquiet_log()\nadd_servers({what()!r})"
    python = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert python.returncode == 1 and words in python.stderr.splitlines()[-1] and "ValueError" in python.stderr


HELLO, SUPPORTS_OP = 14, 18                      # enum rpc_cmd


def receive(connection, n):
    data = b""
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def without_kernels(target):
    """Port of a server that passes everything on, but has no kernel for what it is asked about."""
    listener = socket.create_server(("127.0.0.1", 0))

    def requests(near, far):
        try:
            while True:
                head = receive(near, 9)
                body = receive(near, struct.unpack("<BQ", head)[1])
                near.sendall(struct.pack("<QB", 1, 0)) if head[0] == SUPPORTS_OP else far.sendall(head + body)
        except (EOFError, OSError):
            far.shutdown(socket.SHUT_RDWR)       # a close would wait for the other thread's recv

    def answers(near, far):
        try:
            while data := far.recv(1 << 16):
                near.sendall(data)
        except OSError:
            pass

    def accept():
        while True:
            near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", target))
            for way in (requests, answers):
                threading.Thread(target=way, args=(near, far), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize("able", [True, False])
def test_a_server_without_kernels_is_asked_before_the_cache_is_made(ports, tiny_model, able):
    port = ports[0] if able else without_kernels(ports[0])
    script = ("from pykvq.engine import Context, Model, quiet_log\nfrom pykvq.rpc import add_servers\nquiet_log()\n"
              f"add_servers('127.0.0.1:{port}')\nContext(Model({str(tiny_model(64))!r}, 99), 256, 'turbo3').decode([1, 2], 0)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == able, done.stderr
    assert able or re.search("layer 0: device RPC.* has no kernel for cache type turbo3; use f16 or q8_0 there", done.stderr.splitlines()[-1])


def test_a_malformed_question_does_not_end_the_server(tmp_path):
    """Types and operations that exist, sources that are missing, shapes and strides of any kind."""
    rng = random.Random(0)
    port, process = rpc_server(tmp_path)

    def tensor(op):
        numbers = [rng.choice([0, 1, 4, 64, 128, 256]) for _ in range(8)]
        parameters = [rng.choice([0, 1, -1, 5, 1 << 30]) for _ in range(16)]
        return struct.pack("<QIQ8I I16ii 12QQQQ64si", 1, rng.choice([0, 1, 2, 8, 220, 225, 229, 235, 240, 245]), 0, *numbers, op, *parameters, *[0] * 16, b"x", 0)

    def connect():
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)
                connection.sendall(struct.pack("<BQ24x", HELLO, 24))
                receive(connection, struct.unpack("<Q", receive(connection, 8))[0])
                return connection
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, f"the server has ended with {process.poll()}"
                time.sleep(0.1)
    connection, answered = connect(), 0
    try:
        for _ in range(3000):
            sources = [tensor(0) if rng.random() < 0.6 else bytes(len(tensor(0))) for _ in range(12)]
            message = struct.pack("<I", 0 if rng.random() < 0.9 else 1 << 31) + tensor(rng.randrange(110)) + b"".join(sources)
            try:
                connection.sendall(struct.pack("<BQ", SUPPORTS_OP, len(message)) + message)
                assert len(receive(connection, struct.unpack("<Q", receive(connection, 8))[0])) == 1
                answered += 1
            except (EOFError, ConnectionError):
                connection = connect()
        assert answered > 1000 and process.poll() is None
    finally:
        process.terminate()
        process.wait(30)


def test_cut_link_is_an_error_and_not_an_abort(ports, tmp_path):
    """Where this process alone meets the other host: the server stays, says why, and gives no text made of zeros."""
    link = Link(ports[0])
    model = architectures.sliding_window(tmp_path / "tiny.gguf")
    server = Server(executable("llama-server"), model, tmp_path / "log", "--rpc", f"127.0.0.1:{link.port},127.0.0.1:{ports[1]}", "--gpu-layers", "99",
                    "--cache-type-k", "turbo3", "--cache-type-v", "turbo3", "--parallel", "2", "--ctx-size", "1024", "--fit", "off",
                    "--slot-save-path", f"{tmp_path}/")
    try:
        whole = completion(server, 0, "Once upon a time")
        assert whole["tokens_predicted"] == 8 and link.sent > 100_000
        link.cut()
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as error:
                completion(server, 0, "Once upon a time there was another text")
            assert error.value.code == 500
            assert f"RPC server 127.0.0.1:{link.port}" in json.load(error.value)["error"]["message"]
        assert server.request("GET", "/health") == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError):
            server.request("POST", "/slots/0?action=save", {"filename": "zeros.bin"})
        assert not (tmp_path / "zeros.bin").exists() or not (tmp_path / "zeros.bin").stat().st_size
    finally:
        server.stop()
    assert not re.search("ABORT|assert", server.log.read_text(), re.I)
