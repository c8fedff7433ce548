"""pykvq serve --epicache as a user runs it, spoken to with the official OpenAI client; and what pykvq epicache inspect says of it."""
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner
from openai import OpenAI

from pykvq.cli import main

SERVE = "from pykvq.cli import main; main()"


class Server:
    """pykvq serve on a free port."""

    def __init__(self, model, store, log):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        arguments = ["serve", model, "--epicache", "--budget", "400", "--room", "400", "--encoder", "model", "--store", store, "--threads", "2",
                     "--port", self.port]
        with log.open("w") as f:
            self.process = subprocess.Popen([sys.executable, "-c", SERVE, *map(str, arguments)], stdout=f, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.1)
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=120, max_retries=0)

    def ask(self, messages, question, **options):
        """The list with question and answer, and the answer's object."""
        messages = [*messages, {"role": "user", "content": question}]
        made = self.client.chat.completions.create(model="any", messages=messages, **{"max_tokens": 8, "temperature": 0, **options})
        return [*messages, {"role": "assistant", "content": made.choices[0].message.content}], made

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def start(talker, tmp_path_factory):
    servers = []

    def make(store):
        servers.append(Server(talker, store, tmp_path_factory.mktemp("serve") / "log"))
        return servers[-1]
    yield make
    for server in servers:
        server.process.poll() is None and server.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


def test_a_long_conversation_and_a_restart(start, store):
    server, said, ids = start(store), [{"role": "system", "content": "Be brief."}], set()
    assert [m.id for m in server.client.models.list()] == ["talker"]
    told = {"rebuilt": 0}
    while not told["rebuilt"]:                   # so that the next turn needs no update
        said, made = server.ask(said, f"The dog likes the beach. Remark {len(said)}.")
        told = made.model_extra["epicache"]
        ids.add(told["conversation"])
        assert made.usage.prompt_tokens_details.cached_tokens == told["reused"] and made.usage.completion_tokens == told["answer"] > 0
    assert len(ids) == 1 and told["episodes"]
    server.stop()
    server = start(store)
    said, made = server.ask(said, "Who likes it?")
    told = made.model_extra["epicache"]
    assert told["conversation"] in ids and told["restored"] and told["not_restored"] is None and not told["rebuilt"]

    stream = server.client.chat.completions.create(model="any", messages=said[:-1], max_tokens=8, temperature=0, stream=True,
                                                   stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said[-1]["content"]
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens and chunks[-2].choices[0].finish_reason in ("stop", "length")

    broken = server.client.chat.completions.create(model="any", messages=said[:-1], max_tokens=300, temperature=0, stream=True)
    next(iter(broken))
    broken.close()                               # a client that goes away leaves the server free and the conversation as it was
    assert server.ask(said[:-2], said[-2]["content"])[0] == said
    server.stop()


@pytest.mark.parametrize("body, words", [({"messages": []}, "must be the user's"), ({"messages": 3}, "list of"), ({"tools": [{"type": "function"}]}, "not served"),
                                         ({"n": 2}, "not served"), ({"max_tokens": 0}, "at least 1"), ({"temperature": "hot"}, "take numbers"),
                                         ({"messages": [{"role": "user", "content": "x" * 500}], "stream": True}, "raise room")])
def test_bad_requests(server, body, words):
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **body}).encode()
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/chat/completions", body, {"Content-Type": "application/json"}))
    assert error.value.code == 400 and words in json.load(error.value)["error"]["message"]
    assert server.ask([], "Hi")[1].choices[0].message.content


@pytest.fixture(scope="module")
def server(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("other"))


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def test_inspect(store, tmp_path):
    found = json.loads(run("epicache", "inspect", store, "--json").stdout)
    entry = found["conversations"][0]
    assert found["conversation"] == entry["id"] and entry["files"] >= 1 and len(found["episodes"]) >= 2
    assert sum(e["segments"] for e in found["episodes"]) == len(found["timeline"]) and all(0 < e["cells"] == e["tokens"] for e in found["episodes"])
    shown = run("epicache", "inspect", store)
    assert shown.exit_code == 0 and entry["id"] in shown.stdout and "".join(map(str, found["timeline"])) in shown.stdout


def test_plot(store, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("epicache", "inspect", store, "--plot", tmp_path / "talk.svg").exit_code == 0
    assert (tmp_path / "talk.svg").read_text().count("<path") > 4


@pytest.mark.parametrize("arguments, words", [(("serve", "model.gguf"), "needs --epicache"), (("serve", "missing.gguf", "--epicache"), "no model file"),
                                              (("epicache", "inspect", "nowhere"), "no conversations are saved")])
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr


def test_a_missing_package_is_one_line(monkeypatch, talker):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run("serve", talker, "--epicache")
    assert result.exit_code == 2 and result.stderr == "error: EpiCache needs uvicorn; run: pip install 'pykvq[epicache]'\n"


def test_a_port_in_use_is_one_line_before_anything_is_loaded(talker, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(main, ["serve", str(talker), "--epicache", "--store", str(tmp_path), "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "cannot listen on 127.0.0.1" in result.stderr and "use another --port" in result.stderr
