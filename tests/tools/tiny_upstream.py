"""A tiny upstream: an sdist with a build backend of its own, so that pip can fetch it without any network."""
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"

NUMBERS = "".join(f"line {i}\n" for i in range(1, 41))
BACKEND = '''
import os, pathlib
pathlib.Path(os.environ.get("BACKEND_RAN", os.devnull)).write_text("yes")
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "tiny_upstream-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-upstream\\nVersion: 1.0\\n")
    return info.name
'''
FILES = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-upstream\nVersion: 1.0\n",
    "backend.py": BACKEND,
    "vendor/llama.cpp/numbers.txt": NUMBERS,
    "vendor/llama.cpp/other.txt": "other\n",
    "vendor/llama.cpp/docs/large.md": "not unpacked\n",
    "vendor/llama.cpp/models/large.gguf": "not unpacked\n",
}
HEADER = "{subject}\n\nWhat: a line.\nWhy: a test.\nRelies on: numbers.txt.\nDrop when: never.\n---\n"
PATCHED = "vendor/llama.cpp/numbers.txt"


def hunk(line: int, new: str, old: str | None = None) -> str:
    """Replace one line of numbers.txt, with three lines of context."""
    lines = [f" line {i}\n" for i in range(line - 3, line + 4)]
    lines[3] = f"-{old or f'line {line}'}\n+{new}\n"
    # Git names the last line before a hunk that could open a function.
    return f"@@ -{line - 3},7 +{line - 3},7 @@ line {line - 4}\n" + "".join(lines)


def patch_text(subject: str, *hunks: str) -> str:
    return (HEADER.format(subject=subject) + f"diff --git a/{PATCHED} b/{PATCHED}\n--- a/{PATCHED}\n+++ b/{PATCHED}\n"
            + "".join(hunks))


def write_sdist(path: Path, files: dict[str, str], extra: list[tarfile.TarInfo] = ()) -> str:
    """Write a gzipped tar with one top folder; returns its SHA-256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tiny_upstream-1.0/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in extra:
            archive.addfile(member)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Upstream:
    """Folders of one test: the index that pip reads, patches/, and the cache."""
    root: Path
    index: Path
    patches: Path
    cache: Path

    @property
    def sdist(self) -> Path:
        return self.index / "tiny_upstream-1.0.tar.gz"

    def pin(self, sha256: str) -> None:
        (self.patches / "UPSTREAM").write_text(
            'package = "tiny-upstream"\nversion = "1.0"\nsdist = "tiny_upstream-1.0.tar.gz"\n'
            f'sha256 = "{sha256}"\nllama_cpp_commit = "abc"\n')

    def set_patches(self, **texts: str) -> None:
        """Names without number and suffix, in order."""
        names = []
        for number, (name, text) in enumerate(texts.items(), start=1):
            names.append(f"{number:04d}-{name}.patch")
            (self.patches / names[-1]).write_text(text)
        (self.patches / "series").write_text("# order of application\n" + "".join(f"{n}\n" for n in names))

    def keep_sdist(self) -> None:
        """As if an earlier run had fetched it."""
        self.cache.mkdir(exist_ok=True)
        (self.cache / self.sdist.name).write_bytes(self.sdist.read_bytes())

    def start(self, tool: str, *arguments, **environment) -> subprocess.Popen:
        """A tool as a process that sees only this test's index and cache."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        env.update(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.index), PYKVQ_CACHE_DIR=str(self.root))
        env.update(environment)
        return subprocess.Popen([sys.executable, str(TOOLS / tool), "--patches", str(self.patches), *map(str, arguments)],
                                env={k: v for k, v in env.items() if v}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, tool: str, *arguments, **environment) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a tool."""
        process = self.start(tool, *arguments, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err
