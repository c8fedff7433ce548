"""Conversations longer than the budget, against the plain cache where it fits and against themselves after a restart."""
import numpy as np
import pytest

from pykvq.engine import Context
from pykvq.epicache.messages import Message


def plain_answer(epicache, messages, tokens):
    """Greedy, from a cache that holds everything."""
    messages = [Message(*m) for m in messages]
    system = [m for m in messages if m.role == "system"]
    prompt = [*epicache.renderer.prefix(system), *(t for m in messages[len(system):-1] for t in epicache.renderer.utterance(m, system).tokens),
              *epicache.renderer.question(messages[-1], system)]
    with Context(epicache.model, 2048, threads=2) as context:
        logits, out = context.decode(prompt, 0)[-1], []
        while len(out) < tokens and not epicache.model.ends(token := int(logits.argmax())):
            out.append(token)
            logits = context.decode([token], len(prompt) + len(out) - 1)[-1]
    return epicache.model.text(out)


def test_a_short_conversation_is_whole(make):
    epicache = make()
    messages = [("system", "Be brief."), ("user", "Hello there."), ("assistant", "Hi."), ("user", "How are you?")]
    answer = epicache.chat([{"role": role, "content": content} for role, content in messages], max_tokens=12)
    assert answer == plain_answer(epicache, messages, 12)
    first = epicache.last
    assert not first.restored and not first.episodes and first.reused == 0
    epicache.ask("And you?", max_tokens=4)
    assert epicache.last.evaluated < 60 and epicache.last.reused > 0.8 * first.evaluated


@pytest.mark.parametrize("episode", [False, True])
def test_a_long_conversation_stays_in_its_cells(grown, episode):
    epicache = grown(episode=episode)
    cells = epicache.context.info()[0].cells
    turn, memory = epicache.last, epicache.conversation.memory
    history = len(memory.tokens(epicache.utterances()))
    assert history > 2 * epicache.budget and turn.episodes and len(memory.episodes) >= 2
    assert turn.reused + turn.evaluated + turn.answer <= cells and bool(turn.looked) != episode


@pytest.mark.parametrize("episode", [False, True])
def test_a_restored_cache_is_used(grown, episode):
    """Only what comes after the memory is evaluated, and nothing of that when the same is asked again."""
    epicache = grown(episode=episode)
    epicache._base = None
    said = [*epicache.conversation.said, Message("user", "What makes good tables?")]
    first = epicache.chat(said, max_tokens=6)
    turn, memory = epicache.last, epicache.conversation.memory
    behind = sum(len(u.tokens) for u in epicache.utterances()[memory.built:-2]) + len(epicache.renderer.question(said[-1], []))
    assert turn.restored and turn.evaluated == behind and turn.reused == epicache.budget and turn.looked == (0 if episode else 2 * behind)
    assert epicache.chat(said, max_tokens=6) == first
    again = epicache.last
    assert not again.restored and again.evaluated == 1 and not again.looked and again.episodes == turn.episodes


def test_the_answer_depends_on_what_was_kept(grown):
    """The cells of an episode hold the history: with their values emptied the next token is another one."""
    epicache = grown(episode=True)
    memory = epicache.conversation.memory
    kept = epicache.keeper.recall(memory, [0], [1.0], 3000)
    rows = []
    for cells in (kept.tokens, [np.full_like(t, ~0) for t in kept.tokens]):
        state = kept.state.gather([np.where(c < 0, c, np.arange(c.shape[1])) for c in cells], kept.state.positions)
        epicache.builder.restore(state)
        rows.append(epicache.context.decode([50, 51], 3000)[-1])
    assert np.abs(rows[0] - rows[1]).max() > 0.1


def test_only_episodes_with_news_are_rebuilt(grown):
    epicache = grown(episode=True)
    before = {id(e.cache) for e in epicache.conversation.memory.episodes}
    clustered, rebuilt = epicache.conversation.memory.clustered, 0
    while not rebuilt:
        epicache.ask("The dog likes the beach. Again.", max_tokens=8)
        rebuilt = epicache.last.rebuilt
    memory = epicache.conversation.memory
    after = {id(e.cache) for e in memory.episodes}
    if memory.clustered == clustered:
        assert rebuilt == len(after - before) < len(after)


def test_two_episodes_share_the_cells(grown):
    epicache = grown(episode=True)
    memory = epicache.conversation.memory
    a, b = memory.episodes[0].cache, memory.episodes[1].cache
    end = max(a.end, b.end) + 50
    both = epicache.keeper.recall(memory, [0, 1], [1.0, 0.9], end)
    assert len(both.state.positions) == epicache.budget and both.state.positions.max() == end - 1
    for layer in range(2):
        for h in range(2):
            row, x, y = (set(c.tokens[layer][h].tolist()) for c in (both, a, b))
            assert len(row) == epicache.budget and row <= x | y and row - x and row - y
    only = epicache.keeper.recall(memory, [0, 1], [1.0, 0.0], end)      # weights that drop the second: only what must stay is from it
    assert all(len(set(only.tokens[layer][h].tolist()) - set(a.tokens[layer][h].tolist())) <= epicache.builder.plan.recent
               for layer in range(2) for h in range(2))


def test_an_archive_only_grows(grown):
    """It takes up what was said soon, reads each token once, and keeps its rows as they are."""
    epicache, ran = grown(), []
    epicache.builder.step = ran.append
    memory = epicache.conversation.memory
    keys = memory.archive.rows(np.arange(memory.archive.end)).keys[1].data
    for i in range(3):
        epicache.ask(f"The dog likes the beach. Again {i}.", max_tokens=8)
    grew = epicache.conversation.memory.archive
    assert grew.end > memory.archive.end and epicache.last.rebuilt <= len(epicache.conversation.memory.episodes)
    assert np.array_equal(grew.rows(np.arange(memory.archive.end)).keys[1].data, keys)
    assert sum(len(u.tokens) for u in epicache.utterances()[epicache.conversation.memory.built:]) <= epicache.block
    assert all(len(chunk.state.positions) >= epicache.block for chunk in grew.chunks[:-1])


def test_a_list_that_goes_another_way(grown):
    """An edited early message: nothing of the old memory remains."""
    epicache = grown()
    said = [*epicache.conversation.said]
    edited = [Message("user", "Something else."), *said[1:], Message("user", "What now?")]
    answer = epicache.chat(edited, max_tokens=8)
    assert epicache.last.rebuilt == len(epicache.conversation.memory.episodes)
    assert epicache.chat(edited, max_tokens=8) == answer and epicache.conversation.said[0].content == "Something else."


def test_streaming_and_stop_texts(make):
    epicache = make()
    whole = epicache.ask("Tell me.", max_tokens=30)
    pieces = list(make().chat([{"role": "user", "content": "Tell me."}], stream=True, max_tokens=30))
    assert len(pieces) > 3 and "".join(pieces) == whole
    stop = whole[5:8]
    cut = make().ask("Tell me.", max_tokens=30, stop=[stop])
    assert cut == whole[:whole.index(stop)]


def test_sampling_is_seeded(make):
    a, b, c = (make().ask("Tell me.", max_tokens=20, temperature=1.0, top_p=0.95, seed=seed) for seed in (1, 1, 2))
    assert a == b != c


def test_a_broken_restore_does_not_poison(grown, monkeypatch):
    epicache = grown()
    said = [*epicache.conversation.said, Message("user", "What makes good tables?")]
    good = epicache.chat(said, max_tokens=6)
    epicache._base = None
    monkeypatch.setattr(epicache.context, "load", lambda *_, **__: (_ for _ in ()).throw(ValueError("refused")))
    with pytest.raises(ValueError, match="refused"):
        epicache.chat(said, max_tokens=6)
    monkeypatch.undo()
    assert epicache.chat(said, max_tokens=6) == good


@pytest.mark.parametrize("messages, words", [([], "must be the user's"), ([{"role": "assistant", "content": "x"}], "must be the user's"),
                                             ([{"role": "tool", "content": "x"}], "role"), ([{"role": "user", "content": "x" * 500}], "raise room"),
                                             ([{"role": "user", "content": [{"type": "image_url"}]}], "only text")])
def test_wrong_messages_are_refused(make, messages, words):
    with pytest.raises(ValueError, match=words):
        make().chat(messages)


def test_quantised_types(grown):
    for kv_type in ("turbo3", ("q8_0", "turbo4")):
        assert grown(12, kv_type=kv_type).last.episodes


def test_weights_of_a_llama(talker):
    from setting import OPTIONS
    from llama_cpp import Llama
    from pykvq.epicache import EpiCache
    llama = Llama(str(talker), n_ctx=256, kv_type="turbo4", verbose=False)
    with EpiCache(llama, **OPTIONS) as epicache:
        assert epicache.context.kv_type == ("turbo4", "turbo4")
        epicache.ask("Hello.", max_tokens=3)
    assert llama("Hello", max_tokens=2)["choices"]           # still alive
    llama.close()


def test_a_hybrid_is_refused(tmp_path):
    import architectures
    from pykvq.epicache import EpiCache
    with pytest.raises(ValueError, match="more bytes"):
        EpiCache(architectures.hybrid(tmp_path / "hybrid.gguf"), budget=200)


def test_the_nearest_windows_as_they_are(grown, monkeypatch):
    """A share of the budget that attention cannot take."""
    from dataclasses import replace

    from pykvq.epicache.recall import Asked
    epicache, always = grown(), []
    monkeypatch.setattr("pykvq.epicache.memory.recalled", lambda *a: always.append(int(a[4].sum())))
    for share in (0.0, 0.8):
        epicache.keeper.settings = replace(epicache.keeper.settings, whole=share)
        epicache.keeper.lookup(epicache.conversation.memory, "What makes good tables?", Asked([], [1]))
    assert always[0] < 40 < always[1] <= 0.8 * epicache.budget
