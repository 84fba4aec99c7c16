"""Compiles `cpu_codec.cpp` with the C++ compiler of the machine, once, and loads it.

The library is kept below the user's cache directory under a name that follows from the source, the
command and the compiler's version, so that other processes find it and other machines with the same
home directory do not run instructions that they lack.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("cpu_codec.cpp")
HEADER = Path(__file__).with_name("cpu_dtypes.h")

# Rounding as in eager PyTorch, operation by operation; infinities and NaN are kept.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fopenmp-simd"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
# By what torch itself found the processor to have.
_VECTOR_FLAGS = {
    "AVX2": ("-mavx2", "-mf16c"),
    "AVX512": ("-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The codec of `cpu_codec.cpp`.

    Raises:
        RuntimeError: there is no C++ compiler (`CXX`, else `g++` or on macOS `clang++`), it failed,
            or what it made cannot be kept or loaded. The message names the remedy.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise RuntimeError(
            f"there is no C++ compiler {name!r}. Install g++, or set CXX to a compiler"
        )
    vector_flags = _VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())
    command = (compiler, *_FLAGS, *vector_flags, str(SOURCE))
    version = _run(compiler, "--version")
    parts = (SOURCE.read_text(), HEADER.read_text(), *command, version)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    try:
        library = _cache_directory() / f"cpu_codec-{key[:16]}.so"
        if not library.exists():
            _build(command, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise RuntimeError(
            f"{error}. The compiled codec is kept in {_cache_directory()}: set XDG_CACHE_HOME to "
            "a directory where files can be made and run"
        ) from error


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "loco_fsdp"


def _build(command: tuple[str, ...], library: Path) -> None:
    """Other processes may do the same at the same time: each sees the whole file or none."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        made = Path(directory) / library.name
        _run(*command, "-o", str(made))
        made.replace(library)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed. Set CXX to another compiler:\n{done.stderr[-2000:]}"
        )
    return done.stdout
