"""Rung 6: a real llama-server with a turbo3 cache, spoken to with the official OpenAI client."""
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import architectures
import pytest
from openai import OpenAI

from pykvq.launch import executable

PROMPTS = ["Name the capital of France.", "Count from one to five.", "What is the opposite of hot?", "Name a fruit that is yellow."]


class Server:
    """One llama-server on a free port, stopped by stop()."""

    def __init__(self, program, model, log, *arguments):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = log
        with log.open("w") as f:
            self.process = subprocess.Popen([program, "--model", model, "--port", str(self.port), "--host", "127.0.0.1", "--threads", "2", *arguments],
                                            stdout=f, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while True:
            try:
                self.request("GET", "/health")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.2)

    def request(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def client(self):
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=120, max_retries=0)

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def start(program, smollm2, tmp_path_factory):
    servers = []

    def make(*arguments):
        servers.append(Server(program("llama-server"), smollm2, tmp_path_factory.mktemp("server") / "log", *arguments))
        return servers[-1]
    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(start, tmp_path_factory):
    return start("--cache-type-k", "turbo3", "--cache-type-v", "turbo3", "--parallel", "4", "--ctx-size", "4096",
                 "--slot-save-path", f"{tmp_path_factory.mktemp('slots')}/", "--verbosity", "4")


def ask(client, prompt, tokens=24):
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=tokens, seed=1)
    return answer.choices[0].message.content


def test_load_log_tells_types_and_bytes(server):
    assert "30 x K turbo3_64 V turbo3_64" in server.log.read_text()


def test_four_slots_at_once_answer_like_one_at_a_time(server):
    client = server.client()
    alone = [ask(client, p) for p in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: ask(client, p), PROMPTS))
    assert together == alone
    assert "Paris" in alone[0] and all(alone)


def test_streaming(server):
    stream = server.client().chat.completions.create(model="any", messages=[{"role": "user", "content": PROMPTS[0]}], temperature=0, max_tokens=24,
                                                     stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == ask(server.client(), PROMPTS[0])


def completion(server, slot, prompt):
    return server.request("POST", "/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0, "id_slot": slot, "cache_prompt": True})


def test_saved_slot_is_reused_after_restore(server):
    prompt = "The quick brown fox jumps over the lazy dog. " * 8 + "The quick brown"
    first = completion(server, 2, prompt)
    saved = server.request("POST", "/slots/2?action=save", {"filename": "fox.bin"})
    server.request("POST", "/slots/2?action=erase", {})
    restored = server.request("POST", "/slots/2?action=restore", {"filename": "fox.bin"})
    assert restored["n_restored"] == saved["n_saved"] > 80
    again = completion(server, 2, prompt)
    assert again["content"] == first["content"]
    assert again["timings"]["cache_n"] >= saved["n_saved"] - 16 and again["timings"]["prompt_n"] <= 16       # no second prefill


def test_slot_of_another_type_is_refused(server, start, tmp_path):
    other = start("--cache-type-k", "turbo4", "--cache-type-v", "turbo4", "--parallel", "4", "--ctx-size", "4096", "--slot-save-path", f"{tmp_path}/")
    completion(other, 0, "Some prompt to fill the slot with.")
    other.request("POST", "/slots/0?action=save", {"filename": "other.bin"})
    folder = server.process.args[server.process.args.index("--slot-save-path") + 1]
    (tmp_path / "other.bin").rename(f"{folder}other.bin")
    with pytest.raises(urllib.error.HTTPError) as error:
        server.request("POST", "/slots/1?action=restore", {"filename": "other.bin"})
    assert error.value.code == 400 and "under another setting; cache: 30 x K turbo4_64 V turbo4_64, not 30 x K turbo3_64" in error.value.read().decode()
    assert "Paris" in ask(server.client(), PROMPTS[0])       # the server goes on


def test_truncated_slot_file_is_refused(server):
    completion(server, 1, "A prompt that is long enough to be cut in half. " * 4)
    server.request("POST", "/slots/1?action=save", {"filename": "whole.bin"})
    folder = Path(server.process.args[server.process.args.index("--slot-save-path") + 1])
    whole = (folder / "whole.bin").read_bytes()
    (folder / "half.bin").write_bytes(whole[:len(whole) // 2])
    with pytest.raises(urllib.error.HTTPError) as error:
        server.request("POST", "/slots/1?action=restore", {"filename": "half.bin"})
    assert error.value.code == 400 and json.load(error.value)["error"]["message"].split("slot save file: ")[1]
    assert server.request("POST", "/slots/1?action=restore", {"filename": "whole.bin"})["n_restored"] > 40
    assert "Paris" in ask(server.client(), PROMPTS[0])       # the server goes on


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
def test_slot_that_does_not_exist_is_refused(server, action):
    completion(server, 3, "Something that slot 7 must not overwrite.")
    server.request("POST", "/slots/3?action=save", {"filename": "three.bin"})
    folder = Path(server.process.args[server.process.args.index("--slot-save-path") + 1])
    before = (folder / "three.bin").read_bytes()
    completion(server, 3, "Now it holds another prompt.")
    with pytest.raises(urllib.error.HTTPError) as error:
        server.request("POST", f"/slots/7?action={action}", {"filename": "three.bin"})
    assert error.value.code == 400 and "Invalid slot ID" in error.value.read().decode()
    assert (folder / "three.bin").read_bytes() == before


def test_batch_smaller_than_the_number_of_slots(start, server):
    small = start("--cache-type-k", "turbo3", "--cache-type-v", "turbo3", "--parallel", "4", "--ctx-size", "2048", "--batch-size", "1", "--ubatch-size", "1")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda p: completion(small, -1, p)["content"], ["The capital of France is"] * 4))
    assert len(set(answers)) == 1 and "Paris" in answers[0]


def test_draft_model_with_its_own_cache_type_changes_nothing(server, start, smollm2):
    drafted = start("--cache-type-k", "turbo3", "--cache-type-v", "turbo3", "--parallel", "1", "--ctx-size", "1024", "--model-draft", str(smollm2),
                    "--cache-type-k-draft", "turbo2", "--cache-type-v-draft", "turbo3", "--spec-type", "draft-simple", "--spec-draft-n-max", "4", "--verbosity", "4")
    client = drafted.client()
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": PROMPTS[1]}], temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == ask(server.client(), PROMPTS[1])
    assert "turbo2_64" in drafted.log.read_text()
    assert answer.model_extra["timings"]["draft_n"] > 0


def test_f16_window(start, tmp_path):
    """Two slots of a 2-bit cache: the window survives a slot file and a context shift, and the answers are right with it."""
    windowed = start("--cache-type-k", "turbo2", "--cache-type-v", "turbo2", "--kv-sink", "16", "--kv-recent", "64", "--parallel", "2", "--ctx-size",
                     "1024", "--no-kv-unified", "--ubatch-size", "64", "--context-shift", "--slot-save-path", f"{tmp_path}/", "--verbosity", "4")
    assert "16 sinks and 64 recent tokens also in f16" in windowed.log.read_text()
    assert "Paris" in ask(windowed.client(), PROMPTS[0])
    prompt = "The quick brown fox jumps over the lazy dog. " * 8 + "The quick brown"
    first = completion(windowed, 1, prompt)
    windowed.request("POST", "/slots/1?action=save", {"filename": "fox.bin"})
    windowed.request("POST", "/slots/1?action=erase", {})
    assert windowed.request("POST", "/slots/1?action=restore", {"filename": "fox.bin"})["n_restored"] > 80
    again = completion(windowed, 1, prompt)
    assert again["content"] == first["content"] and again["timings"]["prompt_n"] <= 16
    body = {"prompt": "one two three four five six seven " * 66, "n_predict": 120, "temperature": 0, "id_slot": 0, "ignore_eos": True}
    shifted = windowed.request("POST", "/completion", body)
    assert shifted["tokens_predicted"] == 120 and shifted["tokens_evaluated"] + 120 > 512
    assert completion(windowed, 1, prompt)["content"] == first["content"]       # the other slot is as it was


@pytest.mark.parametrize("arguments, words", [
    (("--cache-type-k", "turbo5"), "unknown cache type 'turbo5'; valid: turbo2, turbo3, turbo4"),
    (("--cache-type-v", "turbo3", "--flash-attn", "off"), "needs flash attention"),
    (("--ctx-size", "2000000000", "--cache-type-k", "turbo3", "--gpu-layers", "0"), "of memory are free")])
def test_bad_input_is_one_line_and_exit_code_2(smollm2, arguments, words):
    """Through the console script, as on a user's PATH."""
    result = subprocess.run([sys.executable, "-c", "import sys; from pykvq.launch import llama_server; sys.exit(llama_server())",
                             "--model", smollm2, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr


def test_the_server_itself_refuses_an_unknown_type(program, smollm2):
    result = subprocess.run([program("llama-server"), "--model", smollm2, "--cache-type-k", "turbo5"], capture_output=True, text=True, timeout=60)
    assert result.returncode > 0                 # negative would be a signal: a crash
    assert "turbo5" in result.stderr


# ---- models that keep their cache in other ways

@pytest.mark.parametrize("build", [architectures.hybrid, architectures.sliding_window, architectures.latent, architectures.encoder_decoder])
def test_other_architectures(program, tmp_path, build):
    model, values = build(tmp_path / "tiny.gguf"), "f16" if build is architectures.encoder_decoder else "turbo3"
    types = ("--cache-type-k", "turbo3", "--cache-type-v", values)
    server = Server(program("llama-server"), model, tmp_path / "log", *types, "--parallel", "2", "--ctx-size", "512")
    try:
        assert all(completion(server, slot, "Once upon a time")["tokens_predicted"] > 0 for slot in (0, 1))
    finally:
        server.stop()
    once = subprocess.run([program("llama-cli"), "-m", model, *types, "-p", "Once upon a time", "-n", "8", "-st", "-t", "2", "--simple-io"],
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert once.returncode == 0, once.stderr[-2000:]


@pytest.mark.parametrize("build, words", [(architectures.encoder_decoder, "position bias rules out flash attention"),
                                          (lambda path: architectures.latent(path, 256, rope=32), "divides head size 288 and its first 256 values")])
def test_the_server_itself_refuses_what_would_abort(tmp_path, build, words):
    """The executable behind the command, which nobody has checked the arguments for."""
    result = subprocess.run([executable("llama-server"), "-m", build(tmp_path / "tiny.gguf"), "-ctk", "turbo3", "-ctv", "turbo3", "--port", "0"],
                            capture_output=True, text=True, timeout=120)
    assert result.returncode > 0                 # negative would be a signal: a crash
    assert words in result.stderr + result.stdout
