"""Carry the patches over to another release of upstream, each as a three-way merge.

    python tools/bump_upstream.py DIR SDIST

Makes the work tree of `tools/vendor.py --edit DIR` (its base is tagged `upstream-old`), puts the files of SDIST in place of
the pinned release's (tag `upstream`) and picks the patches onto them, one after the other. What only moved, or changed
nearby, follows by itself. Where upstream changed the lines of a hunk there is a conflict: all of them are listed first, by
patch and file, and written with their lines to DIR/.git/conflicts; then git stops at the first. Mend it, and

    git add FILE && git cherry-pick --continue

until it is through; a mended conflict that comes again mends itself (rerere). `tools/refresh_patches.py DIR` ends it.
Every error is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from vendor import PATCHES, TRAILER, VendorError, edit_tree, git, load_series, unpack

CONFLICTS = Path(".git", "conflicts")
# zdiff3 shows what the patch was made against beside both sides.
SETTINGS = {"user.name": "pykvq", "user.email": "pykvq@localhost", "rerere.enabled": "true", "rerere.autoUpdate": "false",
            "merge.conflictStyle": "zdiff3", "core.editor": "true", "commit.gpgsign": "false", "core.autocrlf": "false"}
REGION = re.compile(r"^<{7} .*?^>{7} .*?$\n?", re.MULTILINE | re.DOTALL)


def exchange_upstream(tree: Path, sdist: Path) -> str:
    """Put the release of `sdist` under the tag `upstream` of a tree that edit_tree made; returns the commit of the last patch."""
    last = git(tree, "rev-parse", "HEAD").strip()
    git(tree, "tag", "upstream-old", "upstream")
    git(tree, "checkout", "--quiet", "--detach", "upstream-old")
    git(tree, "rm", "-r", "--quiet", ".")
    unpack(sdist, tree)
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--allow-empty", "-m", sdist.name.removesuffix(".tar.gz"))
    git(tree, "tag", "--force", "upstream")
    return last


def unmerged(tree: Path) -> list[str]:
    """Files with conflicts."""
    return git(tree, "diff", "--name-only", "--diff-filter=U").split()


def conflict_regions(tree: Path, file: str) -> list[str]:
    """The texts between the markers, with their line; one line about a file that upstream no longer has."""
    path = tree / file
    text = path.read_text(errors="replace") if path.exists() else ""
    found = [f"line {text.count(chr(10), 0, match.start()) + 1}:\n{match.group()}" for match in REGION.finditer(text)]
    return found or ["upstream no longer has this file, or has no such lines\n"]


def list_conflicts(tree: Path, commits: list[str]) -> list[tuple[str, str, list[str]]]:
    """(patch, file, regions) of every conflict. Each is mended for the patch's side, so that the next patch meets its own alone."""
    found = []
    git(tree, "config", "rerere.enabled", "false")       # what is mended here is mended only for this list
    for commit in commits:
        if picks(tree, commit):
            continue
        name = re.search(rf"^{TRAILER}(.+)$", git(tree, "log", "-1", "--format=%B", commit), re.MULTILINE).group(1)
        found += [(name, file, conflict_regions(tree, file)) for file in unmerged(tree)]
        git(tree, "cherry-pick", "--abort")
        if not picks(tree, "--strategy-option=theirs", commit):
            git(tree, "add", "--all", "--force")         # a file that is gone comes back
            git(tree, "cherry-pick", "--continue")
    git(tree, "config", "rerere.enabled", "true")
    git(tree, "reset", "--quiet", "--hard", "upstream")
    return found


def picks(tree: Path, *what: str) -> bool:
    """git cherry-pick without a conflict."""
    try:
        git(tree, "cherry-pick", "--allow-empty", "--keep-redundant-commits", *what)
    except VendorError:
        if not unmerged(tree):
            raise
        return False
    return True


def bump(tree: Path, sdist: Path, patches: Path = PATCHES, cache: Path | None = None, say=print) -> bool:
    """Make the tree and pick the patches; True when none conflicts. Raises VendorError."""
    if not sdist.is_file():
        raise VendorError(f"{sdist} is no file: pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==NEW")
    edit_tree(tree, patches, cache)
    for name, value in SETTINGS.items():
        git(tree, "config", name, value)
    last = exchange_upstream(tree, sdist)
    commits = git(tree, "rev-list", "--reverse", f"upstream-old..{last}").split()
    found = list_conflicts(tree, commits)
    (tree / CONFLICTS).write_text("\n".join(f"==== {name}: {file}, {region}" for name, file, regions in found for region in regions))
    hunks = sum(patch.text.count(b"\n@@ -") for patch in load_series(patches))
    for name, file, regions in found:
        say(f"{name}: {file}: {len(regions)}")
    say(f"{sum(len(regions) for *_, regions in found)} conflicts for {hunks} hunks of {len(commits)} patches")
    return picks(tree, *commits)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code: 1 when there is something to mend."""
    parser = argparse.ArgumentParser(description="Carry the patches over to another release of upstream.")
    parser.add_argument("tree", type=Path, metavar="DIR", help="a new folder for the work tree")
    parser.add_argument("sdist", type=Path, metavar="SDIST", help="the other release's archive")
    parser.add_argument("--patches", type=Path, metavar="DIR", default=PATCHES, help="folder of the patches (default: patches/)")
    arguments = parser.parse_args(argv)
    try:
        if bump(arguments.tree, arguments.sdist, arguments.patches):
            print(f"all picked; next: python tools/refresh_patches.py {arguments.tree}")
            return 0
        print(f"their lines: {arguments.tree / CONFLICTS}; git stopped at the first: mend, git add, git cherry-pick --continue")
        return 1
    except (VendorError, OSError) as error:
        print(f"bump_upstream.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
