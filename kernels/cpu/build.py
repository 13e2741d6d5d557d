"""Compiles the C++ of this folder into one shared library with a plain C interface.

Runs inside the package's build (setup.py), which has the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libellm_cpu.so"
COMPILERS = ("g++", "clang++", "c++")

_FLAGS = ("-std=gnu++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
_PLAIN = (
    "api.cpp",
    "decoder.cpp",
    "layer.cpp",
    "plan.cpp",
    "product.cpp",
    "run.cpp",
    "threads.cpp",
    "transfer.cpp",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c")


class BuildError(Exception):
    """No compiler, or it failed; the message says what happened."""


def source_hash() -> str:
    """Identifies the sources: a library built from others must not be used."""
    digest = hashlib.sha256()
    files = (*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"), Path(__file__))
    for path in sorted(files, key=lambda path: path.name):  # wherever setup.py runs this from
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """Command of the C++ compiler: $CXX, or the first of `COMPILERS` on the path.

    Raises:
        BuildError: there is none.
    """
    if command := shlex.split(os.environ.get("CXX", "")):
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler found ({', '.join(COMPILERS)}, or set CXX)")


def build(target: Path, flags: Sequence[str] = ()) -> None:
    """Compile and link the library as `target`, replacing it at once when it is complete.

    Args:
        target: path of the library; its folder is created.
        flags: more flags for compiler and linker.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = [*find_compiler(), *_FLAGS, *flags]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        objects = [
            (Path(folder) / f"{i}.o", source, defines)
            for i, (source, defines) in enumerate(_translation_units())
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [*compiler, *defines, "-c", str(FOLDER / source), "-o", str(file)]
                for file, source, defines in objects
            ]
            list(pool.map(_run, commands))
        linked = Path(folder) / LIBRARY
        files = [str(file) for file, _, _ in objects]
        _run([*compiler, "-shared", "-pthread", *files, "-o", str(linked)])
        linked.replace(target)


def _translation_units() -> Iterator[tuple[str, list[str]]]:
    """(source, flags of its own): the vector kernels once per instruction set."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = [f'-DELLM_SOURCES="{source_hash()}"', "-pthread", *(["-DELLM_X86"] if x86 else [])]
    for source in _PLAIN:
        yield source, common
    variants: list[tuple[str, tuple[str, ...]]] = [("Portable", ())]
    if x86:
        variants += [("Avx2", _AVX2), ("Avx512", _AVX512)]
        bf16 = (*_AVX512, "-mavx512bf16")
        variants += [("Avx512Bf16", bf16), ("Amx", (*bf16, "-mamx-tile", "-mamx-bf16"))]
    for name, flags in variants:
        names = [f"-DELLM_KERNELS=k{name}", f'-DELLM_NAME="{name.lower()}"']
        yield "kernels.cpp", [*common, *names, *flags]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")
