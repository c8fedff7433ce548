"""Write patches/ anew from a work tree that `tools/vendor.py --edit DIR` made.

    python tools/refresh_patches.py DIR

Every commit after the tag `upstream` becomes one patch: its message is the header (what,
why, which upstream symbols it relies on, when it can be dropped), its change the diff. The
output holds no hashes, dates or authors, so a refresh without changes rewrites every file
byte for byte. A commit from an existing patch keeps its file name; a new one gets the next
number and a name made of its first line. Every error is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from vendor import PATCHES, TRAILER, VendorError, git, load_series

# Pinned against the user's own git configuration, which would change the output.
DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-renames", "--unified=3", "--diff-algorithm=myers",
        "--no-indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "--inter-hunk-context=0")
# A header without these would leave the next person guessing.
HEADINGS = ("What:", "Why:", "Relies on:", "Drop when:")


def read_commit(tree: Path, commit: str, taken: list[str]) -> tuple[str, str]:
    """File name and text of the patch for one commit. Raises VendorError for an incomplete header."""
    message = git(tree, "log", "-1", "--format=%B", commit)
    trailer = re.search(rf"^{TRAILER}(.+)$", message, re.MULTILINE)
    header = re.sub(rf"^{TRAILER}.*$", "", message, flags=re.MULTILINE).strip("\n")
    subject = header.splitlines()[0] if header else commit
    missing = [heading for heading in HEADINGS if heading not in header]
    if missing:
        raise VendorError(f"commit '{subject}' lacks {', '.join(missing)} in its message: git rebase -i upstream, then reword")
    name = trailer.group(1).strip() if trailer else new_name(subject, taken)
    # Blob hashes churn and `git apply` needs none for text.
    diff = re.sub(r"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", "", git(tree, *DIFF, f"{commit}^", commit), flags=re.MULTILINE)
    if not diff:
        raise VendorError(f"commit '{subject}' changes nothing: drop it with git rebase -i upstream")
    if "GIT binary patch" in diff or "\nBinary files " in diff:
        raise VendorError(f"commit '{subject}' changes a binary file: patches hold text only")
    return name, f"{header}\n---\n{diff}"


def new_name(subject: str, taken: list[str]) -> str:
    """NNNN-words-of-the-subject.patch with the number after the largest taken."""
    numbers = [int(match.group()) for name in taken if (match := re.match(r"\d+", name))]
    words = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:50].rstrip("-")
    return f"{max(numbers, default=0) + 1:04d}-{words}.patch"


def refresh(tree: Path, patches: Path = PATCHES) -> tuple[list[str], list[str]]:
    """Rewrite the series and its patches; returns the names of the changed files and of the removed ones.

    Nothing is written unless every commit makes a sound patch. Raises VendorError.
    """
    git(tree, "rev-parse", "--verify", "--quiet", "upstream")
    if git(tree, "status", "--porcelain"):
        raise VendorError(f"{tree} has uncommitted changes: commit them, or git commit --fixup and rebase")
    old = [patch.name for patch in load_series(patches)]
    wanted: dict[str, str] = {}
    for commit in git(tree, "rev-list", "--reverse", "upstream..HEAD").split():
        name, text = read_commit(tree, commit, old + list(wanted))
        if name in wanted:
            raise VendorError(f"two commits are marked '{TRAILER}{name}': squash them, or remove the line from one")
        wanted[name] = text

    series = patches / "series"
    comments = [line for line in series.read_text().splitlines() if line.startswith("#")]
    files = {**wanted, "series": "".join(f"{line}\n" for line in comments + list(wanted))}
    changed = [name for name, text in files.items() if write_if_changed(patches / name, text)]
    removed = [name for name in old if name not in wanted]
    for name in removed:
        (patches / name).unlink()
    return changed, removed


def write_if_changed(path: Path, text: str) -> bool:
    """True when the file had other contents, or did not exist."""
    data = text.encode()
    if path.exists() and path.read_bytes() == data:
        return False
    path.write_bytes(data)
    return True


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Regenerate patches/ from an edited tree.")
    parser.add_argument("tree", type=Path, metavar="DIR", help="the work tree of tools/vendor.py --edit DIR")
    parser.add_argument("--patches", type=Path, metavar="DIR", default=PATCHES, help="folder to write (default: patches/)")
    arguments = parser.parse_args(argv)
    try:
        changed, removed = refresh(arguments.tree, arguments.patches)
    except (VendorError, OSError) as error:
        print(f"refresh_patches.py: error: {error}", file=sys.stderr)
        return 2
    for name in changed:
        print(f"wrote patches/{name}")
    for name in removed:
        print(f"removed patches/{name}")
    if not changed and not removed:
        print("patches/ is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
