"""tools/vendor.py --edit and tools/refresh_patches.py: round trip, change, addition, removal, refusals."""
import subprocess

import pytest
import refresh_patches
import vendor
from tiny_upstream import HEADER, PATCHED, hunk, patch_text


@pytest.fixture
def edited(upstream):
    """The edited tree of the tiny upstream's two patches."""
    upstream.keep_sdist()
    tree = upstream.root / "edit"
    vendor.edit_tree(tree, upstream.patches, upstream.cache)
    return tree


def git(tree, *arguments, text=None):
    return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tree, check=True, input=text,
                          capture_output=True, text=True).stdout


def contents(upstream):
    return {p.name: p.read_text() for p in upstream.patches.iterdir()}


def change(tree, old, new):
    file = tree / PATCHED
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def commit(tree, subject, header=HEADER):
    git(tree, "commit", "-qaF", "-", text=header.format(subject=subject).removesuffix("---\n"))


def test_edit_makes_one_commit_per_patch(edited):
    assert git(edited, "log", "--reverse", "--format=%s", "upstream..").split() == ["first", "second"]
    assert not git(edited, "status", "--porcelain")


def test_refresh_without_change_rewrites_nothing(upstream, edited):
    before = contents(upstream)
    assert refresh_patches.refresh(edited, upstream.patches) == ([], [])
    assert contents(upstream) == before


def test_users_git_configuration_does_not_change_the_output(upstream, edited):
    for key, value in {"diff.noprefix": "true", "diff.context": "9", "diff.algorithm": "histogram", "color.diff": "always",
                       "diff.mnemonicPrefix": "true"}.items():
        git(edited, "config", key, value)
    assert refresh_patches.refresh(edited, upstream.patches) == ([], [])


def test_fixup_changes_its_patch_only(upstream, edited):
    change(edited, "line twenty\n", "line 20 changed\n")
    git(edited, "commit", "-qa", "--fixup", "HEAD")
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "sequence.editor=true", "rebase", "-qi", "--autosquash",
                    "upstream"], cwd=edited, check=True)
    assert refresh_patches.refresh(edited, upstream.patches) == (["0002-second.patch"], [])
    assert contents(upstream)["0002-second.patch"] == patch_text("second", hunk(20, "line 20 changed"))


def test_new_commit_becomes_the_next_patch(upstream, edited):
    change(edited, "line 33\n", "line thirty-three\n")
    commit(edited, "ggml: a third, with (odd) characters")
    changed, removed = refresh_patches.refresh(edited, upstream.patches)
    name = "0003-ggml-a-third-with-odd-characters.patch"
    assert (changed, removed) == ([name, "series"], [])
    assert contents(upstream)["series"] == f"# order of application\n0001-first.patch\n0002-second.patch\n{name}\n"
    assert (vendor.vendored_tree(upstream.patches, upstream.cache) / PATCHED).read_text() == (edited / PATCHED).read_text()


def test_dropped_commit_removes_its_patch(upstream, edited):
    git(edited, "reset", "-q", "--hard", "HEAD^")
    assert refresh_patches.refresh(edited, upstream.patches) == (["series"], ["0002-second.patch"])
    assert set(contents(upstream)) == {"UPSTREAM", "series", "0001-first.patch"}


def test_uncommitted_changes_are_refused(upstream, edited):
    change(edited, "line 33\n", "half done\n")
    before = contents(upstream)
    with pytest.raises(vendor.VendorError, match="uncommitted changes"):
        refresh_patches.refresh(edited, upstream.patches)
    assert contents(upstream) == before


def test_incomplete_header_is_refused_and_writes_nothing(upstream, edited):
    change(edited, "line five\n", "line 5.0\n")
    commit(edited, "no reasons", "{subject}\n\nWhat: something.\n")
    before = contents(upstream)
    code, _, err = upstream.run("refresh_patches.py", edited)
    assert code == 2 and len(err.splitlines()) == 1
    assert "'no reasons' lacks Why:, Relies on:, Drop when:" in err
    assert contents(upstream) == before


def test_not_an_edited_tree(upstream, tmp_path):
    code, _, err = upstream.run("refresh_patches.py", tmp_path)
    assert code == 2 and len(err.splitlines()) == 1


def test_edit_refuses_a_folder_with_contents(upstream, tmp_path):
    upstream.keep_sdist()
    with pytest.raises(vendor.VendorError, match="not empty"):
        vendor.edit_tree(tmp_path, upstream.patches, upstream.cache)
