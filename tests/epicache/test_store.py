"""Conversations on disk: what comes back, what is refused and why, limits, and processes killed at any moment."""
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from setting import EPISODE

from pykvq.engine import Context
from pykvq.epicache.conversations import Conversations
from pykvq.epicache.messages import Message
from pykvq.epicache.rows import values
from pykvq.sequence_state import SequenceState
from pykvq.epicache.store import Store, prefix_hashes

ASKED = Message("user", "What makes good tables?")


def continued(epicache, conversation):
    """The next answer, from the beginning: nothing is left of what the cells held."""
    epicache._base = None
    epicache.adopt(conversation)
    return epicache.chat([*conversation.system, *conversation.said, ASKED], max_tokens=6)


def test_a_saved_conversation_goes_on(grown, make, tmp_path):
    epicache = grown(13)                         # the next question needs no update
    epicache.save(tmp_path / "talk")
    expected = continued(epicache, epicache.conversation)
    other = make()
    assert other.load(tmp_path / "talk") is None
    assert continued(other, other.conversation) == expected
    turn, behind = other.last, sum(len(u.tokens) for u in other.utterances()[other.conversation.memory.built:-2])
    assert turn.restored and not turn.rebuilt and turn.evaluated == behind + len(other.renderer.question(ASKED, []))


@pytest.mark.parametrize("options, words", [({"kv_type": "q8_0"}, "another cache type"), ({"budget": 300}, "another budget"),
                                            ({"settings": EPISODE}, "another kind of recall"),
                                            ({}, "another encoder")])
def test_another_identity_is_refused_and_the_text_replayed(grown, make, tmp_path, options, words):
    epicache = grown()
    epicache.save(tmp_path / "talk")
    other = make(**options)
    if not options:
        other.encoder_name = "another"
    assert words in other.load(tmp_path / "talk")
    assert other.conversation.memory is None and other.conversation.said == epicache.conversation.said
    assert continued(other, other.conversation) and other.last.rebuilt


def test_another_model_is_refused(grown, tmp_path):
    epicache = grown()
    store = Store(tmp_path)
    store.put("a", epicache.conversation, epicache.identity())
    _, reason = store.get("a", {**epicache.identity(), "model": "other"})
    assert reason.startswith("another model file")


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "sidecar"])
def test_damaged_files_are_refused(grown, tmp_path, harm):
    epicache = grown(episode=True)
    store = Store(tmp_path)
    store.put("a", epicache.conversation, epicache.identity())
    path = next((tmp_path / "a").glob("part1-*.npz"))
    data = path.read_bytes()
    if harm == "cut":
        path.write_bytes(data[:len(data) // 2])
    elif harm == "flip":
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif harm == "gone":
        path.unlink()
    else:
        path.with_name(f"{path.name}.json").write_text("{")
    conversation, reason = store.get("a", epicache.identity())
    assert path.name in reason and conversation.memory is None and conversation.said == epicache.conversation.said


def test_only_what_changed_is_written(grown, tmp_path):
    epicache = grown(episode=True)
    store, identity = Store(tmp_path), epicache.identity()

    def names():
        return {p.name for p in (tmp_path / "a").iterdir()}
    store.put("a", epicache.conversation, identity)
    first = names()
    assert len(first) == 2 * (1 + len(epicache.conversation.memory.episodes))
    store.put("a", epicache.conversation, identity)
    assert names() == first
    memory = epicache.conversation.memory
    changed = replace(memory, episodes=[replace(memory.episodes[0], version="changed"), *memory.episodes[1:]], version="changed")
    store.put("a", replace(epicache.conversation, memory=changed), identity)
    assert len(first - names()) == 4 and len(names()) == len(first)


def test_an_archive_gets_files_for_what_is_new(grown, tmp_path):
    epicache = grown()
    store, identity = Store(tmp_path), epicache.identity()
    store.put("a", epicache.conversation, identity)
    chunks = len(epicache.conversation.memory.archive.chunks)
    first = {p.name for p in (tmp_path / "a").iterdir()}
    assert len(first) == 2 * (1 + chunks) and store.entries()[0].files == chunks >= 2
    while len(epicache.conversation.memory.archive.chunks) == chunks:
        epicache.ask("Oak makes good tables.", max_tokens=8)
    store.put("a", epicache.conversation, identity)
    kept = {p.name for p in (tmp_path / "a").iterdir()} & first
    assert len(kept) in (2 * chunks, 2 * chunks - 2)             # all but the memory's, and the last chunk's if it was short
    back, reason = store.get("a", identity)
    a, b = (m.archive.rows(np.arange(m.archive.end)) for m in (back.memory, epicache.conversation.memory))
    assert reason is None and a.to_bytes() == b.to_bytes() and back.memory.spans == epicache.conversation.memory.spans


def test_the_least_recently_used_lose_their_caches_not_their_text(grown, tmp_path):
    epicache = grown()
    store = Store(tmp_path)
    for id in "abc":
        store.put(id, epicache.conversation, epicache.identity())
    one = store.entries()[0].bytes
    store.close()
    store = Store(tmp_path, limit=2 * one)
    store.get("a", epicache.identity())
    store.put("c", epicache.conversation, epicache.identity())
    assert {e.id: e.bytes for e in store.entries()} == {"a": one, "b": 0, "c": one}
    assert store.get("b", epicache.identity())[0].said == epicache.conversation.said
    assert not list((tmp_path / "b").iterdir())


def test_a_store_serves_one_process(tmp_path):
    store = Store(tmp_path)
    code = f"from pykvq.epicache.store import Store\nStore({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode and "in use by another process" in result.stderr
    store.close()


def test_prefixes():
    said = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    assert list(prefix_hashes(said)) == [2, 4] and prefix_hashes(said)[2] == prefix_hashes(said[:2])[2]
    assert prefix_hashes(said)[4] != prefix_hashes([*said[:3], Message("assistant", "e")])[4]


# ---- a growing list of messages

def talk(conversations, messages, question):
    """One turn; returns the list as a client keeps it."""
    messages = [*messages, {"role": "user", "content": question}]
    answer = "".join(conversations.chat(messages, max_tokens=8))
    return [*messages, {"role": "assistant", "content": answer}]


def test_conversations_are_told_apart_by_their_messages(make, tmp_path):
    conversations = Conversations(make(), tmp_path)
    a, b = talk(conversations, [], "I am Ann."), None
    first = conversations.last.id
    b = talk(conversations, [], "I am Bob.")
    assert conversations.last.id != first
    for i in range(12):
        a, b = talk(conversations, a, f"The dog likes the beach. {i}"), talk(conversations, b, f"Oak makes tables. {i}")
    assert len(conversations.store.entries()) == 2 and {e.messages for e in conversations.store.entries()} == {26}
    assert all(e.files for e in conversations.store.entries())
    id = conversations.last.id
    again = talk(conversations, b[:-2], b[-2]["content"])                        # the last question once more
    assert again == b and conversations.last.id == id and not conversations.epicache.last.rebuilt
    talk(conversations, b[:4], "Another way.")                                  # a branch
    assert conversations.last.id not in (id, first) and len(conversations.store.entries()) == 3
    b = talk(conversations, b, "And on.")
    assert conversations.last.id == id


def test_a_restart_and_a_small_memory(make, tmp_path):
    conversations, said = Conversations(make(), tmp_path, memory_limit=1), []
    for i in range(12):
        said = talk(conversations, said, f"The dog likes the beach. {i}")
    id, expected = conversations.last.id, None
    conversations.close()
    conversations = Conversations(make(), tmp_path)
    said = talk(conversations, said, "Who likes it?")
    assert conversations.last.id == id and conversations.last.reason is None
    assert conversations.epicache.last.restored and not conversations.epicache.last.rebuilt


def test_a_damaged_index_is_told(tmp_path):
    (tmp_path / "index.sqlite").write_text("junk")
    for watch in (True, False):
        with pytest.raises(ValueError, match="index.sqlite is damaged"):
            Store(tmp_path, watch=watch)


# ---- kill -9

CHILD = """
import json, sys
sys.path[:0] = {paths!r}
from setting import OPTIONS, TOPICS
from pykvq.engine import quiet_log
from pykvq.epicache.chat import EpiCache
from pykvq.epicache.conversations import Conversations
quiet_log()
epicache = EpiCache({model!r}, **OPTIONS)
conversations = Conversations(epicache, {root!r})
said = json.loads(sys.stdin.readline())
print("ready", flush=True)
while True:
    said.append(dict(role="user", content=f"{{TOPICS[len(said) // 2 % 3]}} Remark {{len(said) // 2}}."))
    answer = "".join(conversations.chat(said, max_tokens=8))
    said.append(dict(role="assistant", content=answer))
    print(json.dumps(said), flush=True)
"""


def killed(talker, root, kills, turns, seed=1):
    """Run a talking process and kill it, `kills` times: each after up to `turns` answers, at a random moment of the next one, however long it takes
    here. Returns how often a cache was found. See check()."""
    from setting import OPTIONS
    from pykvq.epicache.chat import EpiCache
    rng, said = random.Random(seed), []
    here = Path(__file__).parent
    code = CHILD.format(paths=[str(here), str(here.parent / "models")], model=str(talker), root=str(root))
    used, took = 0, 1.0
    with EpiCache(talker, **OPTIONS) as fresh:
        for _ in range(kills):
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            child.stdin.write(json.dumps(said) + "\n")
            child.stdin.flush()
            assert child.stdout.readline() == "ready\n"
            told = []
            for _ in range(rng.randint(0, turns)):
                begin = time.monotonic()
                told.append(child.stdout.readline().strip())
                took = time.monotonic() - begin
            time.sleep(rng.uniform(0, 1.2 * took))
            child.send_signal(signal.SIGKILL)
            told += child.stdout.read().splitlines()
            child.wait()
            whole = [line for line in told if line.endswith("]")]
            said = json.loads(whole[-1]) if whole else said
            used += check(root, said, fresh)
            if len(said) > 60:
                said = []
    return used


def check(root, said, epicache) -> bool:
    """What was told is there, at most one turn was added, nothing half-written is left, and the caches hold what they say: the keys of the first
    layer, which depend on token and position alone, are those of the text."""
    if not said:
        return False
    store, messages = Store(root), [Message(**m) for m in said]
    try:
        id, n = store.find(messages)
        conversation, reason = store.get(id, epicache.identity())
        assert n == len(messages) and reason is None and conversation.said[:n] == messages and len(conversation.said) <= n + 2
        assert not list(root.glob("*/*.tmp"))
    finally:
        store.close()
    if not conversation.memory:
        return False
    memory, utterances = conversation.memory, [epicache.renderer.utterance(m, []) for m in conversation.said]
    text = memory.tokens(utterances)
    with Context(epicache.model, 4096, threads=2) as context:
        context.decode(text, 0, logits="none")
        expected = values(SequenceState.parse(context.save(0, bare=True)).keys[0].heads(2), 1)
    end = len(memory.tokens(utterances[:memory.built]))
    assert memory.archive.end == end
    np.testing.assert_allclose(values(memory.archive.rows(np.arange(end)).keys[0].heads(2), 1), expected[:end], atol=0.02)
    assert continued(epicache, conversation) is not None and epicache.last.restored
    return True


def test_killed_at_any_moment(talker, tmp_path):
    killed(talker, tmp_path, kills=2, turns=2)


@pytest.mark.slow
def test_killed_a_hundred_times(talker, tmp_path):
    assert killed(talker, tmp_path, kills=100, turns=4) > 20
