"""No slot sees another's text: words planted in conversations turn up in their own answers and files alone (tools/load_server.py, for seconds)."""
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import slot_secrets                              # noqa: E402
from load_server import Load, Server, ask_alone  # noqa: E402

SLOTS = 3


@pytest.fixture(scope="module", params=[(False, "0,0"), (True, "0,0"), (True, "16,64")], ids=["a stream each", "unified", "unified with a window"])
def server(request, smollm2, tmp_path_factory):
    unified, window = request.param
    started = Server(str(smollm2), "turbo3", tmp_path_factory.mktemp("slots"), window, unified=unified, slots=SLOTS)
    yield started
    started.stop()


def test_an_erased_conversation_is_in_no_later_file_and_answer(server):
    word, = slot_secrets.words(1, seed=1)
    assert word in server.complete(slot_secrets.plant(word, "The sea was calm that day, and the boats stayed out until the evening."), 0)
    secret, file = server.secret(word, 0), server.saved(0)
    assert secret.tokens in file and all(row in file for row in secret.rows)
    server.slot(0, "erase")
    for slot in (1, 0):                          # one that was beside it, and one in its cells
        answer = server.complete(f"The sea was calm that day. {slot_secrets.QUESTION}", slot, 60)
        assert not secret.in_text(answer) and not secret.in_file(server.saved(slot))
    for slot in (1, 0):
        server.slot(slot, "erase")


def test_no_word_turns_up_elsewhere_under_load(server):
    load = Load(server, ask_alone(server, SLOTS, lengths=(20, 200)))

    def user(slot):
        for kind in ("answered", "restored", "cancelled", "restored"):
            load.turn(kind, slot, random.Random(slot))
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(user, range(SLOTS)))
    assert not load.misplaced and (not load.wrong or not server.exact)
    assert load.counts["files examined"] == 2 * SLOTS and load.counts["files with their own word"] and load.counts["answers with their own word"] > SLOTS


def test_a_word_in_a_wrong_place_is_found(server):
    """The other slot's file and answer in place of the own ones."""
    load = Load(server, ask_alone(server, 2, lengths=(20,)))
    one, other = (next(c for c in load.conversations if c.slot == slot and c.secret) for slot in (0, 1))
    server.complete(one.prompt, 0)
    file = server.saved(0)
    without_tokens = file[:12] + bytes(4 * len(slot_secrets.file_tokens(file))) + file[12 + 4 * len(slot_secrets.file_tokens(file)):]
    load.examine("planted", other, one.answer)
    load.examine("planted", other, without_tokens)
    assert [(found[1], found[3], found[5], found[6]) for found in load.misplaced] == [(what, 1, 0, one.secret.word) for what in ("answers", "files")]
