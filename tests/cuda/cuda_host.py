"""Builds the CUDA kernels for a CPU (tests/cuda/host), with the grid of test-kvq-cuda.cpp or another program around them.

    python tests/cuda/cuda_host.py OUT [--whole] [--source FILE.cpp]

OUT becomes the program. Without --whole, it has the decode kernels of the quick grid alone.
"""
from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pykvq.native import library_dir

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "host"))

from host_build import ROOT, run, upstream_ggml     # noqa: E402

HOST = HERE / "host"
KERNELS = ROOT / "ggml_kernels/cuda"
GRID = HERE / "test-kvq-cuda.cpp"

CXX = "g++"
MISSING = [tool for tool in (CXX,) if not shutil.which(tool)] + ([] if sys.platform == "linux" else ["Linux"])

COMMON = ["-std=c++17", "-fno-pie", "-DKVQ_HOST_MACHINE", "-DKVQ_HOPPER"]
MACHINE = ["-O2", "-Wall", "-Wextra", "-Wno-unused-function"]
PLAIN = ["-O1", "-x", "c++", "-Wno-unknown-pragmas"]
# Loads and stores become calls: ThreadSanitizer's instrumentation, not its runtime. Products and sums stay apart, as in the reference.
WATCHED = [*PLAIN, "-g1", "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", "-ffp-contract=off", "-fno-extern-tls-init"]

# head sizes of the decode kernels that the quick grid runs, by store of K and V (5: oscar2)
QUICK = {"22": (64, 128), "33": (64, 128, 256), "44": (64, 128), "52": (80, 128)}
QUICK_PREFILL = (64, 80, 96, 128, 256)
SHAPE = {256: "kvq_decode_make<{k}, {v}, 256, 256, 128, 128, 1, 32, 3, 1>()"}


def cache_dir() -> Path:
    """Where objects are kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pykvq/cuda-host"


class Machine:
    """Objects of the machine and of the kernels; arch: 900, or 800 for the paths of older GPUs."""

    def __init__(self, kernels: Path = KERNELS, arch: int = 900, folder: Path | None = None):
        ggml = upstream_ggml()
        self.kernels, self.folder = kernels, folder or cache_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.flags = [*COMMON, f"-D__CUDA_ARCH__={arch}", *(["-D__CUDA_ARCH_FEAT_SM90_ALL"] if arch == 900 else []),
                      *(f"-I{d}" for d in (HOST, kernels, ROOT / "ggml_kernels/include", ggml / "include", ggml / "src"))]

    def compile(self, source: Path, flags: list[str]) -> Path:
        """Object of a source, from the cache when neither the command nor a file that was read has changed."""
        command = [CXX, *self.flags, *flags, "-c", source]
        name = hashlib.sha256("\n".join(map(str, [*command, library_dir()])).encode()).hexdigest()[:24]
        out, key = self.folder / f"{source.stem}-{name}.o", self.folder / f"{source.stem}-{name}.key"

        def digest(files: list[str]) -> str:
            return hashlib.sha256(b"".join(hashlib.sha256(Path(f).read_bytes()).digest() if Path(f).exists() else b"-" for f in files)).hexdigest()

        if out.exists() and key.exists():
            seen, *files = key.read_text().splitlines()
            if seen == digest(files):
                return out
        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            made, rule = Path(work) / "made.o", Path(work) / "made.d"
            run(*command, "-MMD", "-MF", rule, "-o", made)
            files = re.sub(r"\\\n", " ", rule.read_text()).split(":", 1)[1].split()
            made.replace(out)
            (Path(work) / "key").write_text("\n".join([digest(files), *files]))
            (Path(work) / "key").replace(key)
        return out

    def quick_source(self, pair: str, heads: tuple[int, ...]) -> Path:
        """A file with some of the decode kernels of one pair of types."""
        k, v = pair
        cases = "".join(f"    if (dk == {d}) {{ return {SHAPE.get(d, 'kvq_decode_small<{k}, {v}, {d}>()').format(k=k, v=v, d=d)}; }}\n" for d in heads)
        text = (f'#include "kvq-decode-shapes.cuh"\nkvq_decode_entry kvq_find_decode_{pair}(int dk, int dv, bool v_is_k) {{\n'
                f"    if (v_is_k || dk != dv) {{ return {{}}; }}\n{cases}    return {{}};\n}}\n")
        return self.written(f"quick-{pair}", text)

    def written(self, name: str, text: str) -> Path:
        """A source file with this text."""
        path = self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.cu"
        if not path.exists():
            path.write_text(text)
        return path

    def no_kernels(self) -> Path:
        """Look-ups of the instances that the quick grid does without."""
        pairs = [p.stem[-2:] for p in sorted((KERNELS / "instances").glob("kvq-decode-*.cu")) if p.stem[-2:] not in QUICK]
        heads = [h for h in (p.stem.split("-")[-1] for p in sorted((KERNELS / "instances").glob("kvq-prefill-*.cu"))) if int(h) not in QUICK_PREFILL]
        text = '#include "kvq-launch.cuh"\n' + "".join(f"kvq_decode_entry kvq_find_decode_{p}(int, int, bool) {{ return {{}}; }}\n" for p in pairs) + "".join(
            f"kvq_prefill_entry kvq_find_prefill_{h}(int, bool, int) {{ return {{}}; }}\nkvq_fattn_kernel kvq_find_combine_{h}(int, bool) {{ return nullptr; }}\n" for h in heads)
        return self.written("none", text)

    def jobs(self, whole: bool) -> list[tuple[Path, list[str]]]:
        """Sources with their flags, but for the program's own file; the longest first."""
        k = self.kernels
        jobs = [*((HOST / f"{n}.cpp", MACHINE) for n in ("machine", "memory", "device")), (k / "kvq-cuda.cu", PLAIN), (k / "kvq-kernels.cu", PLAIN),
                (k / "kvq-rows.cu", WATCHED), (k / "kvq-transform.cu", WATCHED), (k / "hopper/kvq-hopper.cu", WATCHED)]
        if whole:
            jobs += [(p, WATCHED) for p in sorted((k / "instances").glob("*.cu"))]
        else:
            jobs += [(self.quick_source(*q), WATCHED) for q in QUICK.items()]
            jobs += [(k / f"instances/kvq-prefill-{d}.cu", WATCHED) for d in QUICK_PREFILL] + [(self.no_kernels(), PLAIN)]
        return sorted(jobs, key=lambda j: ("decode" not in j[0].name and "quick" not in j[0].name, "rows" not in j[0].name, "prefill" not in j[0].name))

    def program(self, out: Path, source: Path = GRID, whole: bool = False, replaced: dict[str, Path] | None = None) -> Path:
        """An executable of one C++ file with the host device in it. replaced: objects that stand for those of these sources."""
        libraries, replaced = library_dir(), replaced or {}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            objects = list(pool.map(lambda j: self.compile(*j), [*(j for j in self.jobs(whole) if j[0].name not in replaced), (source, ["-O1"])]))
        objects += replaced.values()
        run(CXX, "-no-pie", *objects, "-rdynamic", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lggml", "-lggml-base", "-lggml-cpu", "-ldl", "-lpthread", "-o", out)
        return out


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    ap.add_argument("--whole", action="store_true", help="every decode and prefill kernel")
    ap.add_argument("--source", type=Path, default=GRID)
    ap.add_argument("--arch", type=int, default=900, choices=[800, 900])
    args = ap.parse_args()
    Machine(arch=args.arch).program(args.out, args.source, args.whole)


if __name__ == "__main__":
    main()
