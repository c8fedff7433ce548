"""tools/vendor.py on a tiny upstream: fetch, verify, patch, share, and fail with one line."""
import errno
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import filelock
import pytest
import vendor
from tiny_upstream import FILES, NUMBERS, PATCHED, hunk, patch_text, write_sdist

ROOT = Path(__file__).parents[2]
TWICE_PATCHED = NUMBERS.replace("line 5\n", "line five\n").replace("line 20\n", "line twenty\n")


def tree_of(upstream):
    return vendor.vendored_tree(upstream.patches, upstream.cache)


def assert_no_tree(upstream):
    left = [p.name for p in upstream.cache.iterdir() if p.is_dir()]
    assert left == [], "a failed run left folders in the cache"


def test_fetch_through_pip_unpack_and_patch(upstream):
    code, out, err = upstream.run("vendor.py")
    assert code == 0, err
    tree = Path(out.strip())
    assert (tree / PATCHED).read_text() == TWICE_PATCHED
    assert not (tree / "vendor/llama.cpp/docs").exists() and not (tree / "vendor/llama.cpp/models").exists()
    assert (upstream.cache / upstream.sdist.name).exists(), "the verified archive is kept"


def test_second_run_does_no_work(upstream):
    upstream.keep_sdist()
    tree = tree_of(upstream)
    before = {p: p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()}
    upstream.sdist.unlink()
    (upstream.cache / upstream.sdist.name).unlink()
    assert tree_of(upstream) == tree
    assert {p: p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()} == before


def test_print_dir_prints_nothing_else(upstream):
    upstream.keep_sdist()
    code, out, err = upstream.run("vendor.py", "--print-dir")
    assert (code, err) == (0, "") and Path(out.strip()).is_dir()


def test_empty_series(upstream):
    upstream.keep_sdist()
    upstream.set_patches()
    assert (tree_of(upstream) / PATCHED).read_text() == NUMBERS


def test_changed_patch_makes_another_tree_and_old_ones_go(upstream):
    upstream.keep_sdist()
    trees = []
    for word in ("a", "b", "c", "d", "e"):
        upstream.set_patches(only=patch_text("only", hunk(5, word)))
        trees.append(tree_of(upstream))
    assert len(set(trees)) == 5
    assert [t.exists() for t in trees] == [False, False, True, True, True]


def test_two_builds_at_once_share_one_download(upstream):
    upstream.cache.mkdir()
    with filelock.FileLock(upstream.cache / ".lock"):
        processes = [upstream.start("vendor.py") for _ in range(2)]
        for process in processes:
            assert "waiting for another build" in process.stderr.readline()
    results = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [code for _, _, code in results] == [0, 0]
    assert results[0][0] == results[1][0], "both print the same folder"
    assert sum("downloading" in err for _, err, _ in results) == 1


def test_wrong_hash_from_the_index_runs_no_code_of_the_archive(upstream):
    upstream.pin("0" * 64)
    ran = upstream.root / "ran"
    code, out, err = upstream.run("vendor.py", "--print-dir", BACKEND_RAN=str(ran))
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "wrong hash" in err and "0" * 64 in err and "nothing was unpacked" in err
    assert not ran.exists()
    assert_no_tree(upstream)


def test_damaged_archive_in_the_cache(upstream):
    upstream.keep_sdist()
    kept = upstream.cache / upstream.sdist.name
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(vendor.VendorError, match="delete this file and run again"):
        tree_of(upstream)
    assert_no_tree(upstream)


@pytest.mark.parametrize("retries", ["0", "1"])
def test_no_network(upstream, retries):
    code, _, err = upstream.run("vendor.py", "--print-dir", PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_RETRIES=retries,
                                PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert code == 2 and len(err.splitlines()) == 1
    assert "cannot be reached" in err and str(upstream.cache) in err
    assert_no_tree(upstream)


@pytest.mark.parametrize("output, expected", [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full"),
    ("/usr/bin/python: No module named pip", "ensurepip"),
    ("ERROR: No matching distribution found for tiny-upstream==1.0", "No matching distribution found"),
    ("", "pip failed"),
])
def test_pip_failures_become_one_line(upstream, output, expected):
    message = vendor.explain_pip(vendor.load_pin(upstream.patches), upstream.cache, output)
    assert expected in message and "\n" not in message


def test_full_disk_leaves_nothing_half_written(upstream, monkeypatch):
    upstream.keep_sdist()

    def full(source, sink, length):
        sink.write(source.read(3))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(vendor.VendorError, match="disk full.*PYKVQ_CACHE_DIR"):
        tree_of(upstream)
    assert_no_tree(upstream)
    monkeypatch.undo()
    assert (tree_of(upstream) / PATCHED).read_text() == TWICE_PATCHED


@pytest.mark.parametrize("applier", ["git", "patch"])
def test_patch_that_does_not_apply_names_file_and_hunk(upstream, monkeypatch, applier):
    if applier == "patch":
        hide_git(monkeypatch)
    upstream.keep_sdist()
    upstream.set_patches(fine=patch_text("fine", hunk(5, "five")),
                         stale=patch_text("stale", hunk(12, "twelve"), hunk(30, "thirty", old="line of an older release")))
    with pytest.raises(vendor.VendorError) as caught:
        tree_of(upstream)
    message = str(caught.value)
    assert "0002-stale.patch does not apply" in message and PATCHED in message
    assert "#2 (@@ -27,7 +27,7 @@ line 26)" in message and "\n" not in message
    assert_no_tree(upstream)


def test_patch_of_a_missing_file_names_it(upstream):
    upstream.keep_sdist()
    upstream.set_patches(gone=patch_text("gone", hunk(5, "five")).replace("numbers.txt", "gone.txt"))
    with pytest.raises(vendor.VendorError, match="0001-gone.patch does not apply.*vendor/llama.cpp/gone.txt"):
        tree_of(upstream)


def hide_git(monkeypatch):
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "git" else real(name))


def test_patch_program_makes_the_same_tree(upstream, monkeypatch):
    hide_git(monkeypatch)
    upstream.keep_sdist()
    assert (tree_of(upstream) / PATCHED).read_text() == TWICE_PATCHED


def test_cache_inside_a_git_repository(upstream):
    subprocess.run(["git", "init", "-q", upstream.root], check=True)
    upstream.keep_sdist()
    assert (tree_of(upstream) / PATCHED).read_text() == TWICE_PATCHED


@pytest.mark.parametrize("name, kind", [
    ("tiny_upstream-1.0/../../evil", tarfile.REGTYPE), ("/evil/file", tarfile.REGTYPE), ("tiny_upstream-1.0/link", tarfile.SYMTYPE),
])
def test_unsafe_archive_is_refused(upstream, name, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    upstream.pin(write_sdist(upstream.sdist, FILES, [member]))
    upstream.keep_sdist()
    with pytest.raises(vendor.VendorError, match="unsafe member"):
        tree_of(upstream)
    assert_no_tree(upstream)


def test_mirror_touches_only_what_a_patch_changed(upstream, tmp_path):
    upstream.keep_sdist()
    mirror = tmp_path / "mirror"
    vendor.vendored_tree(upstream.patches, upstream.cache, mirror)
    for file in ("numbers.txt", "other.txt"):
        os.utime(mirror / "vendor/llama.cpp" / file, (1, 1))
    (mirror / "product.o").write_text("made by a build")
    upstream.set_patches(only=patch_text("only", hunk(5, "five")))
    vendor.vendored_tree(upstream.patches, upstream.cache, mirror)
    assert (mirror / PATCHED).read_text() == NUMBERS.replace("line 5\n", "five\n")
    assert (mirror / PATCHED).stat().st_mtime > 1
    assert (mirror / "vendor/llama.cpp/other.txt").stat().st_mtime == 1
    assert (mirror / "product.o").exists()


def test_mirror_drops_files_of_a_dropped_patch(upstream, tmp_path):
    upstream.keep_sdist()
    added = patch_text("added").split("diff --git")[0] + (
        "diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+new\n")
    upstream.set_patches(added=added)
    mirror = tmp_path / "mirror"
    vendor.vendored_tree(upstream.patches, upstream.cache, mirror)
    assert (mirror / "new.txt").read_text() == "new\n"
    upstream.set_patches()
    vendor.vendored_tree(upstream.patches, upstream.cache, mirror)
    assert not (mirror / "new.txt").exists()


def test_crlf_checkout_gives_the_same_tree(upstream):
    upstream.keep_sdist()
    tree = tree_of(upstream)
    for patch in upstream.patches.glob("*.patch"):
        patch.write_bytes(patch.read_bytes().replace(b"\n", b"\r\n"))
    assert tree_of(upstream) == tree


def test_missing_patch_file_is_named(upstream):
    (upstream.patches / "series").write_text("0009-absent.patch\n")
    code, _, err = upstream.run("vendor.py", "--print-dir")
    assert code == 2 and "0009-absent.patch" in err and len(err.splitlines()) == 1


def test_other_files_name_the_pinned_version():
    version = vendor.load_pin().version
    for file in ("packaging/llama-cpp-python/pyproject.toml", "packaging/compat_extra.py"):
        assert f'"{version}+pykvq"' in (ROOT / file).read_text(), file


def test_real_series_has_complete_headers():
    import refresh_patches
    for patch in vendor.load_series():
        header, diff = patch.split()
        assert all(heading in header for heading in refresh_patches.HEADINGS), patch.name
        assert "\nindex " not in diff, f"{patch.name}: run tools/refresh_patches.py"
