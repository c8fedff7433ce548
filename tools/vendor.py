"""Obtain the pinned upstream, verify it, patch it, and print where the tree lies.

    python tools/vendor.py                 make the tree if needed, print its folder
    python tools/vendor.py --sync DIR      and mirror it into DIR, touching only what changed
    python tools/vendor.py --edit DIR      make a git work tree with one commit per patch

The sdist of llama-cpp-python carries all of llama.cpp, so one archive and one
SHA-256 (patches/UPSTREAM) pin both. A tree lives in the cache under a key made of
that hash and of every patch, so it never changes after it appears: builds may share
it, and a re-run does nothing. Every error is one line and exit code 2.

Patches are applied with `git apply`, or with `patch -p1 -F0` where git is absent:
both refuse fuzz, so a patch means the same thing on every machine.
"""

from __future__ import annotations

import argparse
import errno
import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import filelock
import platformdirs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"

# Most of the archive by size, and nothing in it takes part in a build.
SKIPPED = (
    ".git",
    "docker/",
    "docs/",
    "examples/",
    "tests/",
    "vendor/llama.cpp/.git",
    "vendor/llama.cpp/benches/",
    "vendor/llama.cpp/ci/",
    "vendor/llama.cpp/docs/",
    "vendor/llama.cpp/media/",
    "vendor/llama.cpp/models/",
)
# Trees of older patch sets that stay for builds still reading them.
KEPT_TREES = 3
MANIFEST = ".pykvq-manifest"


class VendorError(Exception):
    """A failure with a one-line message that says what to do."""


@dataclass(frozen=True)
class Pin:
    """The contents of patches/UPSTREAM."""

    package: str
    version: str
    sdist: str
    sha256: str
    llama_cpp_commit: str


@dataclass(frozen=True)
class Patch:
    """One file of the series; `text` is what is applied, header included."""

    path: Path
    text: bytes

    @property
    def name(self) -> str:
        return self.path.name

    def split(self) -> tuple[str, str]:
        """Header text, without the line `---` that ends it, and diff."""
        text = self.text.decode()
        start = re.search(r"^diff --git ", text, re.MULTILINE)
        if start is None:
            raise VendorError(f"{self.path}: no 'diff --git' line, so no change to apply")
        header = text[: start.start()].strip("\n").removesuffix("---").strip("\n")
        return header, text[start.start() :]


def default_cache() -> Path:
    """PYKVQ_CACHE_DIR, or the user's cache folder, with `vendor` below it."""
    base = os.environ.get("PYKVQ_CACHE_DIR") or platformdirs.user_cache_dir("pykvq", appauthor=False)
    return Path(base) / "vendor"


def load_pin(patches: Path = PATCHES) -> Pin:
    """Read patches/UPSTREAM."""
    path = patches / "UPSTREAM"
    try:
        return Pin(**tomllib.loads(path.read_text()))
    except (OSError, TypeError, tomllib.TOMLDecodeError) as error:
        raise VendorError(f"cannot read {path}: {error}") from None


def load_series(patches: Path = PATCHES) -> list[Patch]:
    """Read the patches that patches/series names, in its order."""
    series = []
    try:
        for line in (patches / "series").read_text().splitlines():
            name = line.split("#", 1)[0].strip()
            if name:
                # A checkout with CRLF line ends would change the key and fail to apply.
                text = (patches / name).read_bytes().replace(b"\r\n", b"\n")
                series.append(Patch(patches / name, text))
    except OSError as error:
        raise VendorError(f"cannot read the patch series: {error.filename}: {error.strerror}") from None
    return series


def tree_key(pin: Pin, series: list[Patch]) -> str:
    """Name of the tree: SHA-256 over the sdist's hash, what is unpacked, and the patches."""
    digest = hashlib.sha256(f"{pin.sha256}\n{SKIPPED}\n".encode())
    for patch in series:
        digest.update(hashlib.sha256(patch.text).digest())
    return digest.hexdigest()[:32]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def obtain_sdist(pin: Pin, cache: Path, say=lambda message: None) -> Path:
    """Path of the verified sdist in the cache, downloaded when it is not there yet.

    Raises VendorError for a wrong hash, an unreachable index, or a full disk.
    """
    kept = cache / pin.sdist
    if kept.exists():
        actual = file_sha256(kept)
        if actual != pin.sha256:
            raise VendorError(
                f"{kept} has SHA-256 {actual}, but patches/UPSTREAM pins {pin.sha256}: "
                "delete this file and run again"
            )
        return kept

    say(f"downloading {pin.package} {pin.version} (about 77 MB)")
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=cache) as work:
        requirement = Path(work, "requirement.txt")
        # With the hash given here pip refuses a wrong archive before it runs any code in it.
        requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input",
                   "--no-deps", "--no-binary", pin.package, "--dest", work, "-r", str(requirement)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, errors="replace")
        if result.returncode != 0:
            raise VendorError(explain_pip(pin, cache, result.stdout))
        fetched = Path(work, pin.sdist)
        if not fetched.exists():
            raise VendorError(f"pip did not fetch {pin.sdist}; check 'sdist' in patches/UPSTREAM")
        actual = file_sha256(fetched)
        if actual != pin.sha256:
            raise VendorError(wrong_hash(pin, actual))
        os.replace(fetched, kept)
    return kept


def wrong_hash(pin: Pin, actual: str) -> str:
    return (
        f"wrong hash: the package index gave {pin.sdist} with SHA-256 {actual}, but patches/UPSTREAM "
        f"pins {pin.sha256}; nothing was unpacked: check which index pip uses (pip config list)"
    )


def explain_pip(pin: Pin, cache: Path, output: str) -> str:
    """One line for a failed `pip download`, from what pip printed."""
    what = f"cannot download {pin.package} {pin.version}"
    if "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        return wrong_hash(pin, got.group(1) if got else "unknown")
    if "No space left on device" in output:
        return disk_full(cache)
    if "No module named pip" in output:
        return f"{what}: this Python has no pip; run '{sys.executable} -m ensurepip' first"
    # With no retries pip says of a dead index only that it offers no version.
    unreachable = r"from versions: none|NewConnectionError|Max retries|ConnectionError|ConnectTimeout|ReadTimeout|Retrying \(|ProxyError|SSLError"
    if re.search(unreachable, output):
        return (
            f"{what}: the package index cannot be reached or lacks it; check the network and 'pip config list', "
            f"or put {pin.sdist} into {cache} and run again"
        )
    errors = re.findall(r"^\s*(?:ERROR|error): (.+)", output, re.MULTILINE)
    return f"{what}: {errors[-1] if errors else 'pip failed'}; or put {pin.sdist} into {cache} and run again"


def disk_full(folder: Path) -> str:
    return (
        f"disk full: no space left for the upstream sources (about 250 MB) in {folder}; "
        "free some, or set PYKVQ_CACHE_DIR to a folder on another disk"
    )


def unpack(sdist: Path, dest: Path) -> None:
    """Unpack the archive's one top folder into `dest`, without what SKIPPED names.

    Only plain files whose path stays inside `dest` are accepted.
    """
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            if member.isdir() or len(parts) < 2:
                continue
            if not member.isfile() or member.name.startswith("/") or ".." in parts or "\\" in member.name:
                raise VendorError(f"{sdist.name} holds an unsafe member, {member.name!r}: not unpacked")
            inner = "/".join(parts[1:])
            if inner.startswith(SKIPPED):
                continue
            target = dest / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.extractfile(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)


def apply_patch(tree: Path, patch: Patch) -> None:
    """Apply one patch to `tree`; a VendorError names the file and the hunk that failed."""
    git = shutil.which("git")
    if git:
        # Inside another repository `git apply` would silently skip paths outside it.
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
        command = [git, "-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn", "apply", "-p1", "-"]
    elif shutil.which("patch"):
        env = dict(os.environ)
        command = ["patch", "-p1", "-F0", "-N", "--batch", "--no-backup-if-mismatch", "-r", "-"]
    else:
        raise VendorError("neither git nor patch is installed, so patches/series cannot be applied: install git")
    result = subprocess.run(command, cwd=tree, env=dict(env, LC_ALL="C"), input=patch.text,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        output = result.stdout.decode(errors="replace")
        if "No space left on device" in output:
            raise VendorError(disk_full(tree.parent))
        raise VendorError(explain_patch(patch, output))


def explain_patch(patch: Patch, output: str) -> str:
    """One line that names the file and hunk, from the output of git apply or patch."""
    ending = "mend the patch with tools/vendor.py --edit and tools/refresh_patches.py"
    failed = re.search(r"patch failed: (.+):(\d+)", output)
    if failed:
        file, line = failed.group(1), failed.group(2)
        return f"patches/{patch.name} does not apply: {file}, hunk {find_hunk(patch, file, line=line)}; {ending}"
    failed = re.search(r"Hunk #(\d+) FAILED at (\d+)", output)
    if failed:
        file = re.findall(r"^patching file '?(.+?)'?$", output[: failed.start()], re.MULTILINE)[-1]
        return (
            f"patches/{patch.name} does not apply: {file}, "
            f"hunk {find_hunk(patch, file, number=int(failed.group(1)))}; {ending}"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    return f"patches/{patch.name} does not apply: {lines[0] if lines else 'no message'}; {ending}"


def find_hunk(patch: Patch, file: str, line: str | None = None, number: int | None = None) -> str:
    """The @@ line of a file's hunk, chosen by the old line it starts at or by its number."""
    _, diff = patch.split()
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        if f"\n+++ b/{file}" not in part and f"\n--- a/{file}" not in part:
            continue
        for count, hunk in enumerate(re.findall(r"^@@ .*$", part, re.MULTILINE), start=1):
            if count == number or (line is not None and re.match(rf"@@ -{line}\b", hunk)):
                return f"#{count} ({hunk})"
    return f"at line {line}" if line else f"#{number}"


def prepare(patches: Path, cache: Path) -> tuple[Pin, list[Patch], filelock.FileLock]:
    """The pin, the series, and the cache's lock (not yet held)."""
    pin, series = load_pin(patches), load_series(patches)
    cache.mkdir(parents=True, exist_ok=True)
    return pin, series, filelock.FileLock(cache / ".lock")


def hold(lock: filelock.FileLock, say) -> None:
    """Take the lock, telling the user when another build makes them wait."""
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say("waiting for another build that unpacks the upstream sources")
        lock.acquire()


def vendored_tree(patches: Path = PATCHES, cache: Path | None = None, sync_to: Path | None = None,
                  say=lambda message: None) -> Path:
    """Make the patched tree if it is not in the cache, and return its folder.

    `sync_to` also receives a mirror, made under the same lock. Raises VendorError.
    """
    cache = (cache or default_cache()).absolute()
    try:
        pin, series, lock = prepare(patches, cache)
        tree = cache / tree_key(pin, series)
        hold(lock, say)
        try:
            for stale in cache.glob("tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            if not tree.is_dir():
                sdist = obtain_sdist(pin, cache, say)
                say(f"unpacking {pin.sdist} and applying {len(series)} patches")
                with tempfile.TemporaryDirectory(prefix="tmp-", dir=cache) as work:
                    fresh = Path(work, "tree")
                    unpack(sdist, fresh)
                    for patch in series:
                        apply_patch(fresh, patch)
                    os.replace(fresh, tree)
            os.utime(tree)
            drop_old_trees(cache)
            if sync_to:
                sync(tree, sync_to)
        finally:
            lock.release()
    except OSError as error:
        raise VendorError(explain_os_error(error, cache)) from None
    return tree


def explain_os_error(error: OSError, cache: Path) -> str:
    """One line for a failed file operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(cache)
    return f"{error.filename or cache}: {error.strerror or error}"


def drop_old_trees(cache: Path) -> None:
    """Remove all but the trees used last."""
    trees = [entry for entry in cache.iterdir() if re.fullmatch(r"[0-9a-f]{32}", entry.name)]
    trees.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    for old in trees[KEPT_TREES:]:
        shutil.rmtree(old, ignore_errors=True)


def sync(tree: Path, dest: Path) -> None:
    """Mirror `tree` into `dest`, leaving unchanged files alone.

    A changed patch set has another tree in the cache; the mirror keeps one path and the
    old time stamps, so that a build tool recompiles only what the patches changed.
    Files in `dest` that no earlier mirror put there (build products) stay.
    """
    manifest = dest / MANIFEST
    earlier = set(manifest.read_text().splitlines()) if manifest.exists() else set()
    wanted = []
    for folder, _, names in os.walk(tree):
        for name in names:
            wanted.append(Path(folder, name).relative_to(tree).as_posix())
    dest.mkdir(parents=True, exist_ok=True)
    # Named before they are copied: an interrupted mirror must not orphan files.
    manifest.write_text("\n".join(sorted(earlier.union(wanted))))
    for inner in wanted:
        source, target = tree / inner, dest / inner
        if not target.exists() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    for inner in earlier.difference(wanted):
        (dest / inner).unlink(missing_ok=True)
    manifest.write_text("\n".join(sorted(wanted)))


def git(folder: Path, *arguments: str, text: str | None = None) -> str:
    """Run git in the work tree of --edit and return its output; VendorError when it fails."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    identity = ["-c", "user.name=pykvq", "-c", "user.email=pykvq@localhost", "-c", "core.autocrlf=false",
                "-c", "commit.gpgsign=false"]
    try:
        result = subprocess.run(["git", *identity, *arguments], cwd=folder, env=env, input=text, text=True,
                                capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        raise VendorError("git is not installed, and an edited tree needs it") from None
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise VendorError(f"git {arguments[0]} in {folder}: {lines[0] if lines else 'failed'}")
    return result.stdout


# Names the patch file of a commit, so that refresh_patches.py writes it back where it was.
TRAILER = "Patch-File: "


def edit_tree(dest: Path, patches: Path = PATCHES, cache: Path | None = None, say=lambda message: None) -> None:
    """Make a git work tree in `dest`: tag `upstream`, then one commit per patch.

    Raises VendorError when `dest` is not empty or a patch does not apply; the commits of
    the patches before it are then there, and the rest can be made by hand.
    """
    cache = (cache or default_cache()).absolute()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise VendorError(f"{dest} is not empty: name a new folder for the edited tree")
    try:
        pin, series, lock = prepare(patches, cache)
        hold(lock, say)
        try:
            sdist = obtain_sdist(pin, cache, say)
        finally:
            lock.release()
        dest.mkdir(parents=True, exist_ok=True)
        unpack(sdist, dest)
    except OSError as error:
        raise VendorError(explain_os_error(error, dest)) from None
    git(dest, "init", "--quiet")
    # Upstream's .gitignore must not hide files that a patch adds.
    git(dest, "add", "--all", "--force")
    git(dest, "commit", "--quiet", "-m", f"{pin.package} {pin.version}")
    git(dest, "tag", "upstream")
    for patch in series:
        header, _ = patch.split()
        apply_patch(dest, patch)
        git(dest, "add", "--all", "--force")
        git(dest, "commit", "--quiet", "--cleanup=verbatim", "-F", "-", text=f"{header}\n\n{TRAILER}{patch.name}\n")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch, verify and patch the pinned upstream sources.")
    parser.add_argument("--print-dir", action="store_true", help="print the folder and nothing else")
    parser.add_argument("--cache", type=Path, metavar="DIR",
                        help=f"cache folder (default: {default_cache()}, see PYKVQ_CACHE_DIR)")
    parser.add_argument("--patches", type=Path, metavar="DIR", default=PATCHES,
                        help="folder of UPSTREAM, series and the patches (default: patches/)")
    parser.add_argument("--sync", type=Path, metavar="DIR", help="mirror the tree into DIR as well")
    parser.add_argument("--edit", type=Path, metavar="DIR", help="make a git work tree of the patches in DIR instead")
    arguments = parser.parse_args(argv)

    def say(message: str) -> None:
        if not arguments.print_dir:
            print(f"vendor.py: {message}", file=sys.stderr, flush=True)

    try:
        if arguments.edit:
            edit_tree(arguments.edit, arguments.patches, arguments.cache, say)
            print(arguments.edit.absolute())
        else:
            print(vendored_tree(arguments.patches, arguments.cache, arguments.sync, say))
    except VendorError as error:
        print(f"vendor.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
