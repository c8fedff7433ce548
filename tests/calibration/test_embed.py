"""The kvq keys: round trip through GGUF, the other bytes untouched, failures that keep the old file, splits, refusals."""
import errno
import os
import shutil
import stat
import struct
from collections import namedtuple

import gguf
import numpy as np
import pytest

from pykvq import gguf_file
from pykvq.calibration import embed
from pykvq.calibration.build import build
from pykvq.calibration.embed import embed_in, write_sidecar
from pykvq.calibration.metadata import Embedded, decode, encode
from pykvq.calibration.model_files import fingerprint, splits
from pykvq.calibration.run import calibrate
from pykvq.calibration.transform import Transform
from pykvq.engine import Context, Model, quiet_log
from pykvq.fingerprint import fnv1a64
from pykvq.formats import CODEBOOK
from pykvq.gguf_file import GgufFile
from pykvq.gguf_header import ModelFileError, sidecar_path

quiet_log()


def some_data(fingerprint="fnv1a64:0", layers=(0, 1), h=2, d=8, bias=False):
    rng = np.random.default_rng(1)
    def layer():
        return Transform(rng.standard_normal((h, d)), np.eye(d) + .1 * rng.standard_normal((h, d, d)), np.sort(rng.random((h, d)))[:, ::-1],
                         rng.standard_normal((h, d)) if bias else None)
    return Embedded(fingerprint, CODEBOOK, "measured" if bias else "none", {i: layer() for i in layers},
                    {"text_hash": "ab", "tokens": 512, "source": "test, ünicode", "pykvq_version": "1", "llama_cpp_commit": "c", "positions": 77})


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy that a test may write to."""
    return shutil.copy(tiny_model(64), tmp_path / "tiny.gguf") and tmp_path / "tiny.gguf"


@pytest.mark.parametrize("bias", [False, True])
def test_round_trip(model, tmp_path, bias):
    data = some_data(layers=(0, 3, 11), bias=bias)
    embed_in(model, encode(data), tmp_path / "out.gguf")
    back = decode(GgufFile(tmp_path / "out.gguf"))
    assert (back.fingerprint, back.codebook, back.key_bias, back.provenance) == (data.fingerprint, CODEBOOK, data.key_bias, data.provenance)
    assert list(back.layers) == [0, 3, 11]
    for i, t in data.layers.items():
        for name, dtype in (("mean", np.float16), ("basis", np.float16), ("lam", np.float32)):
            assert np.array_equal(getattr(back.layers[i], name), getattr(t, name).astype(dtype))
        assert (back.layers[i].bias is None) == (not bias)
    assert decode(GgufFile(model)) is None


def test_layout_is_what_the_contract_says(model, tmp_path):
    data = some_data()
    embed_in(model, encode(data), tmp_path / "out.gguf")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    types = {name: field.types for name, field in fields.items() if name.startswith("kvq.")}
    U32, STR, ARR, I32 = (gguf.GGUFValueType[t] for t in ("UINT32", "STRING", "ARRAY", "INT32"))
    assert types.pop("kvq.version") == [U32] and types.pop("kvq.layers") == [ARR, I32]
    assert types.pop("kvq.calibration.tokens") == [U32] and types.pop("kvq.calibration.positions") == [U32]
    assert set(map(tuple, types.values())) == {(STR,)}
    assert set(types) == {"kvq.fingerprint", "kvq.codebook", "kvq.checksum", "kvq.key_bias", *(f"kvq.calibration.{n}" for n in
                          ("text_hash", "source", "pykvq_version", "llama_cpp_commit")),
                          *(f"kvq.blk.{i}.{n}" for i in (0, 1) for n in ("k.mean", "k.basis", "k.lambda"))}
    assert fields["kvq.layers"].contents() == [0, 1] and fields["kvq.calibration.source"].contents() == "test, ünicode"


def test_everything_else_is_untouched(smollm2, tmp_path):
    """A real file with a vocabulary: every key, tensor info and data byte as before; llama.cpp computes the same logits."""
    out = embed_in(smollm2, encode(some_data()), tmp_path / "out.gguf")
    a, b = GgufFile(smollm2), GgufFile(out)
    raw_a, raw_b = smollm2.read_bytes(), out.read_bytes()
    for name, key in a.keys.items():
        assert raw_a[key.start:key.end] == raw_b[b.keys[name].start:b.keys[name].end]
    assert set(b.keys) - set(a.keys) == set(encode(some_data()))
    assert a.tensors == b.tensors and b.data_start % b.alignment == 0
    assert raw_a[a.data_start:] == raw_b[b.data_start:]
    theirs, ours = (gguf.GGUFReader(p) for p in (smollm2, out))
    assert all(x.name == y.name and np.array_equal(x.data, y.data) for x, y in zip(theirs.tensors, ours.tensors, strict=True))
    logits = []
    for path in (smollm2, out):
        with Model(path) as m, Context(m, 256, threads=1) as c:
            logits.append(c.decode([1, 2, 3], 0))
    assert np.array_equal(*logits)


def test_unusual_alignment_is_kept(tmp_path):
    w = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    w.add_custom_alignment(256)
    w.add_tensor("x", np.arange(100, dtype=np.float32))
    w.add_tensor("y", np.arange(7, dtype=np.float32))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    out = embed_in(tmp_path / "a.gguf", encode(some_data()), tmp_path / "b.gguf")
    assert GgufFile(out).alignment == 256 and GgufFile(out).data_start % 256 == 0
    assert [list(t.data) for t in gguf.GGUFReader(out).tensors] == [list(range(100)), list(range(7))]


def test_in_place(model):
    os.chmod(model, 0o640)
    before = model.read_bytes()
    assert embed_in(model, encode(some_data()), model) == model.resolve()
    assert decode(GgufFile(model)).provenance["positions"] == 77 and stat.S_IMODE(model.stat().st_mode) == 0o640
    assert before[GgufFile(model).data_start - len(model.read_bytes()):] == model.read_bytes()[GgufFile(model).data_start:]
    assert os.listdir(model.parent) == ["tiny.gguf"]


def test_in_place_through_a_link_replaces_the_file_behind_it(model, tmp_path):
    (tmp_path / "snapshots").mkdir()
    link = tmp_path / "snapshots" / "m.gguf"
    link.symlink_to(model)
    embed_in(link, encode(some_data()), link)
    assert link.is_symlink() and decode(GgufFile(model)) and os.listdir(link.parent) == ["m.gguf"]


@pytest.mark.parametrize("fault", ["write", "fsync", "replace", "space"])
def test_a_failure_in_place_keeps_the_old_file(model, monkeypatch, fault):
    before = model.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    if fault == "write":
        copy = embed._copy
        monkeypatch.setattr(embed, "_copy", lambda source, start, length, out, *rest: fail() if rest else copy(source, start, length, out))
    elif fault == "space":
        monkeypatch.setattr(embed.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(len(before)))      # the old size is too little
    else:
        monkeypatch.setattr(embed.os, fault, fail)
    with pytest.raises(OSError, match="make room" if fault == "space" else "No space left"):
        embed_in(model, encode(some_data()), model)
    assert model.read_bytes() == before and os.listdir(model.parent) == ["tiny.gguf"]


def test_keys_are_replaced_only_by_force(model):
    embed_in(model, encode(some_data()), model)
    with pytest.raises(ValueError, match="--force"):
        embed_in(model, encode(some_data()), model)
    once = model.read_bytes()
    embed_in(model, encode(some_data(layers=(0,), bias=True)), model, force=True)
    assert list(decode(GgufFile(model)).layers) == [0] and "kvq.blk.1.k.mean" not in GgufFile(model).keys
    embed_in(model, encode(some_data()), model, force=True)
    assert model.read_bytes() == once


def test_a_file_that_exists_is_replaced_only_by_force(model, tmp_path):
    (tmp_path / "out.gguf").write_text("precious")
    with pytest.raises(ValueError, match="--force"):
        embed_in(model, encode(some_data()), tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_text() == "precious"
    embed_in(model, encode(some_data()), tmp_path / "out.gguf", force=True)
    assert decode(GgufFile(tmp_path / "out.gguf"))


def test_sidecar(model):
    path = write_sidecar(model, encode(some_data("fnv1a64:5")))
    assert path == model.parent / "tiny.kvq.gguf" == sidecar_path(model)
    assert decode(GgufFile(path)).fingerprint == "fnv1a64:5" and not gguf.GGUFReader(path).tensors
    with pytest.raises(ValueError, match="--force"):
        write_sidecar(model, encode(some_data()))
    write_sidecar(model, encode(some_data("fnv1a64:6")), force=True)
    assert decode(GgufFile(path)).fingerprint == "fnv1a64:6"


def test_llama_cpp_refuses_a_sidecar_as_a_model(model):
    with pytest.raises(ValueError):
        Model(write_sidecar(model, encode(some_data())))


def split_in_two(model):
    """The tiny model as llama-gguf-split writes it: keys and half of the tensors, then the other half."""
    f, folder = GgufFile(model), model.parent / "split"
    folder.mkdir()
    paths, names = [], list(f.tensors)
    for no, part in enumerate((names[:6], names[6:])):
        entries = [struct.pack("<Q", len(k)) + k.encode() + struct.pack("<I", t) + struct.pack(code, v) for k, t, code, v in
                   (("split.no", 2, "<H", no), ("split.count", 2, "<H", 2), ("split.tensors.count", 5, "<i", len(names)))]
        raw = model.read_bytes()
        if no == 0:
            entries = [raw[k.start:k.end] for k in f.keys.values()] + entries
        infos, offset, data = b"", 0, b""
        for name in part:
            t = f.tensors[name]
            infos += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(t.ne)}QIQ", len(t.ne), *t.ne, t.type, offset)
            blob = f.tensor_data(name)
            data += blob + bytes(-len(blob) % 32)
            offset = len(data)
        out = gguf_file.header(3, len(part), len(entries)) + b"".join(entries) + infos
        paths.append(folder / f"tiny-{no + 1:05d}-of-00002.gguf")
        paths[-1].write_bytes(out + bytes(-len(out) % 32) + data)
    return paths


def test_split_model(model):
    first, second = split_in_two(model)
    assert splits(first) == [first, second] and fingerprint(first) == fingerprint(model)
    rest = second.read_bytes()
    with pytest.raises(ValueError, match="--in-place or --sidecar"):
        embed_in(first, encode(some_data()), first.parent / "out.gguf")
    embed_in(first, encode(some_data()), first)
    assert decode(GgufFile(first)) and second.read_bytes() == rest
    logits = []
    for path in (model, first):
        with Model(path) as m, Context(m, 256, threads=1) as c:
            logits.append(c.decode([1, 2, 3], 0))
    assert np.array_equal(*logits)
    with pytest.raises(ModelFileError, match="name the first one"):
        fingerprint(second)
    second.unlink()
    with pytest.raises(ModelFileError, match="00002-of-00002.gguf is missing"):
        embed_in(first, encode(some_data()), first, force=True)


def test_fingerprint(model, tmp_path):
    f = GgufFile(model)
    data = b"llama" + b"".join(f.tensor_data(n) for n in ("blk.0.attn_norm.weight", "blk.1.attn_norm.weight", "output_norm.weight"))
    assert fingerprint(model) == fnv1a64(data)
    assert fingerprint(embed_in(model, encode(some_data()), tmp_path / "o.gguf")) == fingerprint(model)
    raw = bytearray(model.read_bytes())
    raw[f.data_start + f.tensors["blk.1.attn_norm.weight"].offset] ^= 1
    model.write_bytes(raw)
    assert fingerprint(model) != fnv1a64(data)


@pytest.mark.parametrize("cut", [3, 20, 200, 1000])
def test_truncated_header(model, tmp_path, cut):
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:cut])
    with pytest.raises(ModelFileError):
        GgufFile(tmp_path / "cut.gguf")


def test_big_endian_and_version_1_are_refused(tmp_path):
    for version in (b"\0\0\0\3", b"\1\0\0\0"):
        (tmp_path / "v.gguf").write_bytes(b"GGUF" + version + bytes(16))
        with pytest.raises(ModelFileError, match="version"):
            GgufFile(tmp_path / "v.gguf")


@pytest.mark.parametrize("damage, words", [({"kvq.version": 2}, "upgrade"), ({"kvq.blk.0.k.mean": "!!"}, "damaged"),
                                           ({"kvq.blk.0.k.lambda": "AAAAAA=="}, "do not agree"), ({"kvq.layers": [0, 5]}, "incomplete")])
def test_damaged_keys_are_told(model, tmp_path, damage, words):
    out = embed_in(model, encode(some_data()) | damage, tmp_path / "o.gguf")
    with pytest.raises(ValueError, match=words):
        decode(GgufFile(out))


def test_any_changed_character_is_noticed(model, tmp_path):
    """Where every number stays finite and every shape right, too; a file without the checksum is read and says so."""
    out = embed_in(model, encode(some_data()), tmp_path / "o.gguf")
    whole, file = out.read_bytes(), GgufFile(out)
    assert decode(file).checked
    rng = np.random.default_rng(0)
    for name, key in file.keys.items():
        if not name.startswith("kvq."):
            continue
        for at in rng.integers(key.start, key.end, 12):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << int(rng.integers(8))
            (tmp_path / "d.gguf").write_bytes(damaged)
            try:
                back = decode(GgufFile(tmp_path / "d.gguf"))
            except ValueError:                   # ModelFileError too
                continue
            # the name of a key that says what follows, or a type that makes the same number
            assert back is None or not back.checked or encode(back) == encode(decode(file)), f"byte {at - key.start} of {name}"
    for damage, words in (({"kvq.calibration.tokens": 513}, "checksum does not match"), ({"kvq.layers": [0, 0]}, "kvq.layers does not name")):
        with pytest.raises(ValueError, match=words):
            decode(GgufFile(embed_in(model, encode(some_data()) | damage, tmp_path / "o.gguf", force=True)))
    old = {name: value for name, value in encode(some_data()).items() if name != "kvq.checksum"}
    assert not decode(GgufFile(embed_in(model, old, tmp_path / "o.gguf", force=True))).checked


def test_what_float16_cannot_hold_is_refused():
    data = some_data()
    for bad in (np.nan, 7e4):
        data.layers[1].mean[0, 0] = bad
        with pytest.raises(ValueError, match="layer 1"):
            encode(data)


def test_build_records_where_the_data_come_from(tiny_model):
    path = tiny_model(64)
    stats = calibrate(path, tokens=1024, threads=1)
    data = build(stats, path)
    assert data.fingerprint == fingerprint(path) and data.codebook == CODEBOOK
    assert data.provenance["tokens"] == 1024 and data.provenance["positions"] == stats.positions.max() + 511
    assert len(data.provenance["text_hash"]) == 64 and "own samples" in data.provenance["source"]
    assert sorted(data.layers) == [0, 1] and data.layers[0].basis.shape == (2, 64, 64)
    with pytest.raises(ValueError, match="attn_k.bias"):
        build(stats, path, "attn_k.bias")
    with pytest.raises(ValueError, match="not 'some'"):
        build(stats, path, "some")
    stats.done = 1
    with pytest.raises(ValueError, match="run pykvq calibrate again"):
        build(stats, path)
