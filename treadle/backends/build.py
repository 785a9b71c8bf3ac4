"""Builds the C kernels: one shared library for each instruction set.

Every `treadle/kernels/*.c` and `treadle/ops/**/*.c` is compiled once for each of its dtypes
(float32 and bfloat16, or those that its first line names, as in ``/* dtypes: f32 */``) and
instruction set. Each library is optional: whatever a compiler cannot do is reported and left out,
and with no compiler there are no libraries, so that Treadle runs on the `numpy` backend.

This module uses the standard library alone: `setup.py` loads it before anything is installed.

    python -m treadle.backends.build [--isa NAME]... [--target DIR] [--one-thread] [--strict]

Environment: `CC` names the compiler (GCC or Clang, cross-compilers included), `TREADLE_ISA`
restricts the instruction sets (`TREADLE_ISA=avx2,baseline`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY_FOLDER = PACKAGE / "backends" / "lib"

COMPILE_FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"),
)
DTYPE_FLAGS = {"f32": "-DTREADLE_F32", "bf16": "-DTREADLE_BF16"}
STALE_SECONDS = 3600.0
SHOWN_LINES = 12  # of a failing compiler's messages


@dataclass(frozen=True)
class Isa:
    """One instruction set: its compiler flags, and what of a processor family it belongs to.

    `extends` names a set whose object files serve here too, save for sources that mention `macro`.
    """

    name: str
    family: str
    flags: tuple[str, ...] = ()
    extends: str | None = None
    macro: str = ""


_AVX512 = (
    *("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "-mprefer-vector-width=512",
)

ISAS = (
    Isa("baseline", "x86_64", ("-msse2",)),
    Isa("avx2", "x86_64", ("-mavx2", "-mfma")),
    Isa("avx512", "x86_64", _AVX512),
    Isa("avx512bf16", "x86_64", (*_AVX512, "-mavx512bf16"), "avx512", "__AVX512BF16__"),
    Isa("neon", "aarch64"),
    Isa("baseline", "other"),
)


@dataclass(frozen=True)
class Result:
    """The outcome for one instruction set: the library's path, or None and the reason."""

    isa: str
    path: Path | None
    message: str = ""


@dataclass(frozen=True)
class Compiler:
    """A GCC or Clang that answered: its command line, version text, target triple, thread flags."""

    command: tuple[str, ...]
    version: str
    triple: str
    threads: tuple[str, ...]

    @property
    def family(self) -> str:
        machine = self.triple.split("-")[0]
        names = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
        return names.get(machine, "other")

    @property
    def threaded(self) -> bool:
        return "-DTREADLE_ONE_THREAD" not in self.threads

    @property
    def windows(self) -> bool:
        return "mingw" in self.triple or "windows" in self.triple

    @property
    def suffix(self) -> str:
        if self.windows:
            return ".dll"
        return ".dylib" if "apple" in self.triple or "darwin" in self.triple else ".so"


def library_name(isa: str, suffix: str) -> str:
    """The file name of one instruction set's library, e.g. `libtreadle_avx2.so`."""
    return f"libtreadle_{isa}{suffix}"


# ---- the compiler ------------------------------------------------------------------------------


def _run(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def find_compiler(threads: bool = True) -> Compiler | None:
    """The compiler named by `CC`, else gcc, clang or cc; None when none of them is GCC or Clang."""
    named = os.environ.get("CC")
    candidates = [shlex.split(named)] if named else [["gcc"], ["clang"], ["cc"]]
    for command in candidates:
        status, triple = _run([*command, "-dumpmachine"])
        if status != 0:
            continue
        _, version = _run([*command, "--version"])
        windows = "mingw" in triple or "windows" in triple
        if not threads or not (windows or _links_threads(command)):
            flags: tuple[str, ...] = ("-DTREADLE_ONE_THREAD",)
        else:
            flags = () if windows else ("-pthread",)
        return Compiler(tuple(command), version.splitlines()[0], triple.strip(), flags)
    return None


def _links_threads(command: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(
            "#include <pthread.h>\nint main(void) { return pthread_self() != pthread_self(); }\n"
        )
        probe = [*command, "-pthread", str(source), "-o", str(source.with_suffix(".exe"))]
        return _run(probe)[0] == 0


# ---- sources and objects -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """One object file to be: a source, a dtype, and the command that compiles it."""

    source: Path
    command: tuple[str, ...]
    object: Path


def sources() -> list[Path]:
    """Every C file of the package, in a fixed order."""
    found = [*(PACKAGE / "kernels").glob("*.c"), *(PACKAGE / "ops").rglob("*.c")]
    return sorted(found, key=lambda path: path.relative_to(PACKAGE).as_posix())


def headers() -> list[Path]:
    """Every header of the package, in a fixed order."""
    return sorted([*(PACKAGE / "kernels").glob("*.h"), *(PACKAGE / "ops").rglob("*.h")])


def source_digest() -> str:
    """What the libraries are built from, in 16 digits; they carry it, and loading compares it."""
    found = hashlib.sha256()
    for path in (*sources(), *headers()):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + text + b"\0")
    return found.hexdigest()[:16]


def dtypes_of(text: str) -> list[str]:
    """The dtypes that a source's first line asks for, all of them when it does not say."""
    marker = re.match(r"/\* dtypes: ([a-z0-9 ]+) \*/", text)
    return marker.group(1).split() if marker else list(DTYPE_FLAGS)


def _units(compiler: Compiler, isa: Isa, cache: Path) -> list[_Unit]:
    header_text = b"".join(path.read_bytes() for path in headers())
    digest = source_digest()
    units = []
    for source in sources():
        text = source.read_text(encoding="utf-8")
        own = isa.extends is None or isa.macro in text or "TREADLE_ISA" in text
        chosen = isa if own else next(i for i in ISAS if i.name == isa.extends)
        flags = [*COMPILE_FLAGS, *chosen.flags, "-I", str(PACKAGE / "kernels")]
        if not compiler.windows:
            flags.append("-fPIC")
        elif "clang" not in compiler.version:
            # GCC does not align the stack for 32-byte vectors on Windows (its bug 54412).
            flags.append("-Wa,-muse-unaligned-vector-move")
        if "TREADLE_ISA" in text:
            flags += [f"-DTREADLE_ISA={isa.name}", f"-DTREADLE_SOURCES={digest}"]
        if "TREADLE_ONE_THREAD" in text:
            flags += compiler.threads
        for dtype in dtypes_of(text):
            command = (*compiler.command, *flags, DTYPE_FLAGS[dtype], "-c", str(source))
            key = hashlib.sha256(repr((command, compiler.version, text)).encode() + header_text)
            stem = source.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
            name = f"{stem}-{dtype}-{chosen.name}-{key.hexdigest()[:16]}.o"
            units.append(_Unit(source, command, cache / name))
    return units


def _write(command: Sequence[str], target: Path) -> str:
    """Runs `command -o target` so that target appears whole or not at all; returns its messages.

    Raises RuntimeError with the compiler's first messages when it fails.
    """
    scratch = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    status, output = _run([*command, "-o", str(scratch)])
    if status != 0:
        scratch.unlink(missing_ok=True)
        lines = output.strip().splitlines() or [f"{command[0]} ended with status {status}"]
        raise RuntimeError("\n".join(lines[:SHOWN_LINES]))
    scratch.replace(target)
    return output


def _compile(unit: _Unit) -> str:
    """Compiles unless the object is there already; returns warnings, or raises RuntimeError."""
    if unit.object.exists():
        return ""
    return _write(unit.command, unit.object)


# ---- libraries ---------------------------------------------------------------------------------


def _link(compiler: Compiler, isa: str, objects: Sequence[Path], target: Path, cache: Path) -> Path:
    key = hashlib.sha256(repr([path.name for path in objects]).encode()).hexdigest()[:16]
    linked = cache / f"{isa}-{key}{compiler.suffix}"
    if not linked.exists():
        # A DLL carries the compiler's own run-time libraries, because Windows would not find them.
        static = ["-static"] if compiler.windows else []
        inputs = [str(path) for path in objects]
        _write([*compiler.command, "-shared", *static, *inputs, *compiler.threads, "-lm"], linked)
    library = target / library_name(isa, compiler.suffix)
    if not library.exists() or library.read_bytes() != linked.read_bytes():
        # A new file, not new contents: a process that has the old library loaded keeps it whole.
        scratch = library.with_name(f"{library.name}.{os.getpid()}.tmp")
        shutil.copy(linked, scratch)
        scratch.replace(library)
    return library


def _sweep(cache: Path, keep: set[Path]) -> None:
    """Removes objects of older sources; recent ones may belong to a build that runs beside this."""
    limit = time.time() - STALE_SECONDS
    for path in cache.iterdir():
        if path not in keep and path.stat().st_mtime < limit:
            path.unlink(missing_ok=True)


def wanted_isas(compiler: Compiler, names: Iterable[str] | None = None) -> list[Isa]:
    """What to build: `names`, else those of `TREADLE_ISA`, else all of the compiler's target.

    `TREADLE_ISA` always includes the baseline: its library tells what a processor supports.
    """
    known = [isa for isa in ISAS if isa.family == compiler.family]
    if names is None:
        names = [name for name in re.split(r"[,\s]+", os.environ.get("TREADLE_ISA", "")) if name]
        names = [*names, known[0].name] if names else [isa.name for isa in known]
    chosen = set(names)
    unknown = sorted(chosen - {isa.name for isa in known})
    if unknown:
        options = ", ".join(isa.name for isa in known)
        raise ValueError(
            f"[build] no instruction set {', '.join(unknown)} for {compiler.triple}; "
            f"choose from {options}"
        )
    return [isa for isa in known if isa.name in chosen]


def build(
    target_dir: Path | str = LIBRARY_FOLDER,
    isas: Iterable[str] | None = None,
    *,
    threads: bool = True,
    cache_dir: Path | str | None = None,
) -> list[Result]:
    """Compiles the libraries into `target_dir` and returns one result an instruction set.

    Compiling uses all processors; what has not changed is taken from `cache_dir` (default:
    `build/kernels` of a source tree, otherwise a temporary folder). Raises ValueError for an
    unknown name in `isas`.
    """
    compiler = find_compiler(threads)
    if compiler is None:
        tried = os.environ.get("CC") or "gcc, clang, cc"
        return [Result("all", None, f"no C compiler found (tried {tried}); install GCC or Clang")]
    chosen = wanted_isas(compiler, isas)
    target = Path(target_dir)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        in_tree = (PACKAGE.parent / "setup.py").exists()
        default = PACKAGE.parent / "build" / "kernels" if in_tree else Path(temporary)
        cache = Path(cache_dir) if cache_dir is not None else default
        cache.mkdir(parents=True, exist_ok=True)
        return _build(compiler, chosen, target, cache)


def _build(compiler: Compiler, isas: Sequence[Isa], target: Path, cache: Path) -> list[Result]:
    plans = {isa.name: _units(compiler, isa, cache) for isa in isas}
    units = {unit.object: unit for plan in plans.values() for unit in plan}
    failures: dict[Path, str] = {}
    warnings: dict[Path, str] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        pending = {path: pool.submit(_compile, unit) for path, unit in units.items()}
        for path, future in pending.items():
            try:
                warnings[path] = future.result()
            except RuntimeError as error:
                failures[path] = str(error)
    results = []
    for name, plan in plans.items():
        notes = [failures[unit.object] for unit in plan if unit.object in failures]
        if notes:
            results.append(Result(name, None, "\n".join(notes)))
            continue
        objects = [unit.object for unit in plan]
        notes = [warnings[path] for path in objects if warnings[path]]
        try:
            library = _link(compiler, name, objects, target, cache)
        except RuntimeError as error:
            results.append(Result(name, None, str(error)))
            continue
        results.append(Result(name, library, "\n".join(notes)))
    _sweep(cache, set(units))
    return results


def report(results: Sequence[Result], threads: bool) -> str:
    """What was built, what was not, and why, as text for a person."""
    lines = []
    for result in results:
        lines.append(f"treadle kernels, {result.isa}: {result.path or 'not built'}")
        lines += [f"    {line}" for line in result.message.splitlines()]
    built = any(result.path for result in results)
    if not built:
        lines.append("treadle runs without compiled kernels, on the slower numpy backend.")
    elif not threads:
        lines.append("treadle kernels run on one thread: the compiler has no POSIX threads.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m treadle.backends.build", description=__doc__)
    parser.add_argument("--isa", action="append", help="build only this instruction set")
    parser.add_argument(
        "--target", type=Path, default=LIBRARY_FOLDER, help="folder of the libraries"
    )
    parser.add_argument("--one-thread", action="store_true", help="build for one thread")
    parser.add_argument("--strict", action="store_true", help="fail on errors and warnings")
    options = parser.parse_args()
    threads = not options.one_thread
    results = build(options.target, options.isa, threads=threads)
    compiler = find_compiler(threads)
    print(report(results, bool(compiler and compiler.threaded)))
    clean = all(result.path and not result.message for result in results)
    return 1 if options.strict and not clean else 0


if __name__ == "__main__":
    sys.exit(main())
