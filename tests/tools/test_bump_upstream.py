"""tools/bump_upstream.py: patches that follow upstream by themselves, conflicts that are listed and mended, and the way back to patches/."""
import subprocess

import bump_upstream
import pytest
import refresh_patches
import vendor
from tiny_upstream import FILES, NUMBERS, PATCHED, write_sdist


@pytest.fixture
def bumped(upstream):
    """bumped(numbers, ...) bumps to a release whose patched file says so; returns tree, whether it went through, and what was said."""
    upstream.keep_sdist()

    def bump(numbers, **files):
        sdist = upstream.root / "tiny_upstream-2.0.tar.gz"
        release = {name: text for name, text in ({**FILES, PATCHED: numbers} | files).items() if text is not None}
        write_sdist(sdist, release)
        said = []
        return upstream.root / "edit", bump_upstream.bump(upstream.root / "edit", sdist, upstream.patches, upstream.cache, said.append), said
    return bump


def git(tree, *arguments):
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout


def test_what_moved_and_changed_nearby_follows(upstream, bumped):
    """`git apply` refuses both hunks: the context of one has changed, and 30 lines stand before it."""
    numbers = "".join(f"new {i}\n" for i in range(30)) + NUMBERS.replace("line 7\n", "line seven\n").replace("line 18\n", "")
    tree, through, said = bumped(numbers)
    assert through and said == ["0 conflicts for 2 hunks of 2 patches"]
    assert (tree / PATCHED).read_text() == numbers.replace("line 5\n", "line five\n").replace("line 20\n", "line twenty\n")
    assert refresh_patches.refresh(tree, upstream.patches) == (["0001-first.patch", "0002-second.patch"], [])
    assert "line seven" in (upstream.patches / "0001-first.patch").read_text()


def test_a_conflict_is_listed_and_mended(upstream, bumped):
    numbers = NUMBERS.replace("line 5\n", "line 5 of theirs\n")
    tree, through, said = bumped(numbers)
    assert not through and said == [f"0001-first.patch: {PATCHED}: 1", "1 conflicts for 2 hunks of 2 patches"]
    listed = (tree / bump_upstream.CONFLICTS).read_text()
    assert f"==== 0001-first.patch: {PATCHED}, line 5:" in listed and "line 5 of theirs" in listed and "line five" in listed
    (tree / PATCHED).write_text(numbers.replace("line 5 of theirs", "line five of theirs"))
    git(tree, "add", PATCHED)
    git(tree, "cherry-pick", "--continue")
    assert git(tree, "log", "--reverse", "--format=%s", "upstream..").split() == ["first", "second"]
    refresh_patches.refresh(tree, upstream.patches)
    first = (upstream.patches / "0001-first.patch").read_text()
    assert "-line 5 of theirs\n+line five of theirs\n" in first and "What: a line." in first and vendor.TRAILER not in first


def test_a_file_that_is_gone_is_a_conflict(bumped):
    tree, through, said = bumped(None)
    assert not through and [line.split(":")[0] for line in said[:-1]] == ["0001-first.patch"]
    assert "no longer has this file" in (tree / bump_upstream.CONFLICTS).read_text()


def test_a_change_that_upstream_has_made_itself_is_no_conflict(upstream, bumped):
    tree, through, said = bumped(NUMBERS.replace("line 5\n", "line five\n"))
    assert through and said[-1].startswith("0 conflicts")
    with pytest.raises(vendor.VendorError, match="'first' changes nothing: drop it"):
        refresh_patches.refresh(tree, upstream.patches)


def test_no_archive(upstream, tmp_path):
    code, _, err = upstream.run("bump_upstream.py", tmp_path / "edit", tmp_path / "none.tar.gz")
    assert code == 2 and len(err.splitlines()) == 1 and "pip download" in err
