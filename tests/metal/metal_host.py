"""Builds the host machine for Metal kernels: translated kernels as shared libraries, and programs that run them.

The programs use the installed libggml and libggml-cpu as the reference, upstream's C++ files of its Metal backend unchanged,
and host/device.cpp in place of its Objective-C files.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pykvq.native import library_dir

HERE = Path(__file__).resolve().parent
HOST = HERE / "host"
sys.path[:0] = [str(HOST), str(HERE.parent / "host")]

from host_build import ROOT, run, upstream_ggml     # noqa: E402
from translate import translate                     # noqa: E402

KERNELS = ROOT / "ggml_kernels/metal"

MISSING = [tool for tool in ("clang++", "cmake", "objcopy") if not shutil.which(tool)]

# Loads and stores become calls (ThreadSanitizer's instrumentation, not its runtime), none wider than 16 bytes; products and
# sums stay apart, as in the reference.
KERNEL_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-builtin", "-ffp-contract=off", "-fsanitize=thread", "-fno-vectorize", "-fno-slp-vectorize",
                "-mllvm", "-tsan-instrument-func-entry-exit=0", "-fdelayed-template-parsing", "-Wno-everything"]
UPSTREAM = ("ops", "device", "fusion", "common", "tuning")


class Machine:
    """Compiled parts of the machine in a folder, made once and reused by all programs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ggml = upstream_ggml()
        self.metal = self.ggml / "src/ggml-metal"
        self.includes = [f"-I{d}" for d in (self.ggml / "include", self.ggml / "src", self.metal, ROOT / "ggml_kernels/include", KERNELS, HOST, HERE)]
        run("cmake", f"-DOUT={folder / 'kvq-metal-source.cpp'}", "-P", KERNELS / "embed.cmake")
        self.objects = []
        sources = [*((self.metal / f"ggml-metal-{n}.cpp", ["-O0", "-w"]) for n in UPSTREAM),
                   (self.metal / "ggml-metal.cpp", ["-O0", "-w", "-include", "memory"]),
                   *((HOST / f"{n}.cpp", ["-O2", "-Wall", "-Wextra", "-Wno-unused-function"]) for n in ("machine", "memory", "library", "device")),
                   *((p, ["-O1", "-Wall", "-Wextra", "-Wno-unused-function"]) for p in (KERNELS / "kvq-metal.cpp", folder / "kvq-metal-source.cpp"))]
        with ThreadPoolExecutor(2) as pool:
            self.objects = list(pool.map(lambda s: self.compile(*s), sources))

    def compile(self, source: Path, flags: list[str]) -> Path:
        out = self.folder / f"{source.stem}.o"
        run("clang++", "-std=c++17", "-Werror", *flags, *self.includes, "-c", source, "-o", out)
        return out

    def program(self, source: Path) -> Path:
        """An executable of one C++ file with the host device in it."""
        out, libraries = self.folder / source.stem, library_dir()
        run("clang++", "-std=c++17", "-O1", *self.includes, source, *self.objects, "-rdynamic", f"-L{libraries}", f"-Wl,-rpath,{libraries}",
            "-lggml", "-lggml-base", "-lggml-cpu", "-ldl", "-o", out)
        return out

    def library(self, text: str, name: str) -> Path:
        """A shared library of translated kernels. The linker sends their memcpy and memset to the machine."""
        source, made, out = (self.folder / f"{name}{s}" for s in (".cpp", ".o", ".so"))
        source.write_text(text)
        f16c = ["-mf16c"] if os.uname().machine == "x86_64" else []
        run("clang++", *KERNEL_FLAGS, *f16c, f"-I{HOST}", "-c", source, "-o", made)
        run("objcopy", "--redefine-sym", "memcpy=metal_host_memcpy", "--redefine-sym", "memset=metal_host_memset", made)
        run("clang++", "-shared", made, "-o", out)
        return out

    def upstream_kernels(self, name: str, only: str) -> str:
        """Translation of one of upstream's Metal files, with the kernels whose names match."""
        return translate(self.metal / f"kernels/{name}.metal", [str(self.metal / "kernels"), str(self.metal), str(self.ggml / "src")], only=only)

    def own_kernels(self) -> dict[str, str]:
        """Translations of the project's libraries, from the text that the build embeds."""
        embedded = (self.folder / "kvq-metal-source.cpp").read_text()
        texts = {}
        for name, source in zip(("rows", "decode", "prefill"), re.findall(r'R"kvq\((.*?)\)kvq"', embedded, re.S), strict=True):
            path = self.folder / f"{name}.metal"
            path.write_text(source)
            texts[name] = translate(path)
        return texts


def execute(program: Path, libraries: list[Path], *arguments: str, strict: bool = False) -> subprocess.CompletedProcess:
    """Runs a program with kernels from these libraries."""
    environment = {**os.environ, "METAL_HOST_LIBRARIES": ":".join(map(str, libraries))}
    if strict:
        environment["METAL_HOST_STRICT"] = "1"
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, env=environment, timeout=1500)
