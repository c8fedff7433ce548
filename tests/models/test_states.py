"""Saved states know what they are: another model, type or setting, a cut and a changed bit are refused, and nothing else changes."""
import ctypes
import re
import struct

import llama_cpp.llama_cpp as native
import numpy as np
import pytest
import write_slot_file

from pykvq import engine
from pykvq.engine import Context, Model, quiet_log
from pykvq.tiny_model import write_tiny_model

TOKENS = [(7 * i * i + 3) % 256 for i in range(40)]


@pytest.fixture(scope="module")
def model(tiny_model):
    quiet_log()
    with Model(tiny_model(64)) as loaded:
        yield loaded


@pytest.fixture
def context(model):
    """Two sequences of different text."""
    with Context(model, 256, "turbo3", n_seq=2, unified=True, threads=2) as made:
        made.decode(TOKENS, 0, 0, logits="none")
        made.decode(TOKENS[::-1], 0, 1, logits="none")
        yield made


@pytest.fixture
def unchanged(context):
    """Fails when a test has altered a sequence."""
    before = [context.save(s) for s in (0, 1)]
    yield
    assert [context.save(s) for s in (0, 1)] == before


def of(model, kv_type="turbo3", **options):
    with Context(model, 256, kv_type, threads=2, **options) as other:
        other.decode(TOKENS[:9], 0, logits="none")
        return other.save(0)


def test_another_type(context, unchanged, model):
    with pytest.raises(ValueError, match="under another setting; cache: 2 x K turbo4_64 V turbo4_64, not 2 x K turbo3_64 V turbo3_64"):
        context.load(of(model, "turbo4"), 0)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_states_without_a_header(context, unchanged, model, kv_type):
    """Of llama.cpp's own types, in their own format; and ours in a context of those."""
    state = of(model, kv_type)
    assert state[:4] != b"KVQS"
    with pytest.raises(ValueError, match="saved with f16 or another of llama.cpp's types, or by an older version"):
        context.load(state, 0)
    with Context(model, 256, kv_type, threads=2) as plain, pytest.raises(ValueError, match="a cache of other types, which this context does not have"):
        plain.load(context.save(0), 0)


@pytest.mark.parametrize("change", [{"rope_freq_base": 5e5}, {"rope_freq_scale": 0.5}, {"yarn_ext_factor": 1.0}, {"yarn_orig_ctx": 128}], ids=str)
def test_other_frequencies(context, unchanged, model, monkeypatch, change):
    """Keys are stored turned: under another RoPE they would be read as those of other positions."""
    params = native.llama_context_default_params()
    for name, value in change.items():
        setattr(params, name, value)
    with monkeypatch.context() as patched:
        patched.setattr(native, "llama_context_default_params", lambda: params)
        state = of(model)
    with pytest.raises(ValueError, match="under another setting; rope: "):
        context.load(state, 0)


@pytest.mark.parametrize("line, words", [(b"layout ", "layout: "), (b"tables fnv1a64:", "layout: "), (b"model ", "model: "), (b"transforms ", "transforms: ")])
def test_another_version_of_any_line(context, unchanged, line, words):
    """With a right checksum, as a newer or older pykvq would write it: only the rows are summed."""
    state = context.save(0)
    at = state.index(line) + len(line)
    other = b"7" if state[at:at + 1] != b"7" else b"8"
    with pytest.raises(ValueError, match=f"under another setting; {words}"):
        context.load(state[:at] + other + state[at + 1:], 0)


def test_a_fine_tune(context, unchanged, tmp_path):
    """The same shape and the same norms."""
    with Model(write_tiny_model(tmp_path / "tuned.gguf", 64, seed=1)) as tuned, pytest.raises(ValueError, match="under another setting; model: llama "):
        context.load(of(tuned), 0)


@pytest.mark.parametrize("seq", [0, None])
def test_cut_anywhere(context, unchanged, seq):
    state = context.save(seq)
    for n in {0, 1, 3, 4, 23, 24, 200, *range(0, len(state), 997), len(state) - 1}:
        with pytest.raises(ValueError, match="cut off|no saved state"):
            context.load(state[:n], seq)


@pytest.mark.parametrize("seq", [0, None])
def test_any_changed_bit(context, unchanged, seq):
    state = context.save(seq)
    rng = np.random.default_rng(0)
    for at in [*range(32), *rng.integers(32, len(state), 60)]:
        damaged = bytearray(state)
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match="damaged|cut off|another setting|no saved state"):
            context.load(bytes(damaged), seq)


def test_rows_that_do_not_fit_reach_the_reader_and_leave_the_other_sequence(context):
    """Behind a right header, as code that builds states may do it."""
    rows, other = context.save(0, bare=True), context.save(1)
    for n in range(0, len(rows), 501):
        with pytest.raises(ValueError):
            context.load(rows[:n], 0, bare=True)
        assert context.save(1) == other


@pytest.mark.parametrize("pos", [-1, -2147483647, 2 ** 30, 2 ** 31 - 1])
def test_positions_that_cannot_be(context, pos):
    """Found by tests/fuzz/state_reader.cpp: the cells stayed taken until no token had room, or sums with the position overflowed."""
    rows, other = bytearray(context.save(0, bare=True)), context.save(1)
    assert struct.unpack_from("<4i", rows, 8) == (1, 40, 0, 1)      # streams, cells, position and sequences of the first
    struct.pack_into("<i", rows, 16, pos)
    for _ in range(20):
        with pytest.raises(ValueError):
            context.load(bytes(rows), 0, bare=True)
    assert context.save(1) == other
    context.remove(0, 0)
    context.decode([1] * 200, 0, 0, logits="none")


@pytest.mark.parametrize("field, value", [(0, -1), (0, 2 ** 30), (0, 2 ** 31 - 1), (1, 0), (1, 2), (2, 7), (2, -1)])
def test_cells_of_a_whole_state_that_cannot_be(context, field, value):
    """Position, number of sequences, sequence."""
    state = bytearray(context.save(None, bare=True))
    at = state.index(struct.pack("<6i", 0, 1, 0, 1, 1, 0)) + 4 * field
    struct.pack_into("<i", state, at, value)
    with pytest.raises(ValueError):
        context.load(bytes(state), None, bare=True)
    context.clear()
    for seq in (0, 1):
        context.decode(TOKENS, 0, seq, logits="none")


def test_file_covers_its_tokens(context, unchanged, tmp_path):
    path = tmp_path / "state.bin"
    tokens = (native.llama_token * 40)(*TOKENS)
    assert native.llama_state_seq_save_file(context.handle, str(path).encode(), 0, tokens, 40) == path.stat().st_size
    out, n = (native.llama_token * 64)(), ctypes.c_size_t()

    def load():
        return native.llama_state_seq_load_file(context.handle, str(path).encode(), 0, out, 64, ctypes.byref(n))
    data = bytearray(path.read_bytes())
    data[12 + 4 * 7] ^= 1
    path.write_bytes(data)
    assert load() == 0
    data[12 + 4 * 7] ^= 1
    path.write_bytes(data)
    assert load() == len(data) and list(out[:40]) == TOKENS


@pytest.fixture
def as_written(model):
    """The context of write_slot_file.py, empty."""
    with Context(model, **write_slot_file.CONTEXT) as made:
        yield made


def loaded(context, path) -> list[int]:
    """Tokens of a slot file that was taken; none when it was refused, with the reason logged."""
    out, n = (native.llama_token * 64)(), ctypes.c_size_t()
    taken = native.llama_state_seq_load_file(context.handle, str(path).encode(), 0, out, 64, ctypes.byref(n))
    return list(out[:n.value]) if taken else []


@pytest.mark.parametrize("path", sorted(write_slot_file.FOLDER.glob("*.bin")), ids=lambda path: path.stem)
def test_a_slot_file_of_an_earlier_version(as_written, tmp_path, path):
    """Read as what it was, or refused by its version: rows that mean something else under the same version would be neither."""
    tokens, now = write_slot_file.TOKENS, write_slot_file.version(write_slot_file.write(as_written, tmp_path / "now.bin"))
    before = as_written.save(0)
    engine.forget()
    if write_slot_file.version(path.read_bytes()) != now:
        assert not loaded(as_written, path)
        assert re.search("under another setting; layout: |unknown .magic, version. for sequence state file", engine.reason(""))
        assert as_written.save(0) == before
        return
    as_written.clear()
    assert loaded(as_written, path) == tokens
    assert path.read_bytes().endswith(as_written.save(0, bare=True)[8:])      # a file lacks the magic number and the sequence
    after = as_written.decode([1, 2, 3], len(tokens), logits="all")
    as_written.clear()
    as_written.decode(tokens, 0, logits="none")
    assert np.abs(after - as_written.decode([1, 2, 3], len(tokens), logits="all")).max() < 0.05


def test_this_version_has_its_slot_file(as_written, tmp_path):
    """After a change of layout or tables, or of llama.cpp's own version: python tests/models/write_slot_file.py."""
    now = write_slot_file.version(write_slot_file.write(as_written, tmp_path / "now.bin"))
    assert now in {write_slot_file.version(path.read_bytes()) for path in write_slot_file.FOLDER.glob("*.bin")}


def test_a_slot_file_from_before_the_header(as_written, tmp_path):
    """What the first versions wrote: the rows alone."""
    path = tmp_path / "old.bin"
    data = write_slot_file.write(as_written, path)
    before = as_written.save(0)
    start = data.index(b"KVQS")
    length, = struct.unpack_from("<I", data, start + 4)
    path.write_bytes(data[:start] + data[start + 24 + length:])
    engine.forget()
    assert not loaded(as_written, path) and "or by an older version" in engine.reason("")
    assert as_written.save(0) == before
