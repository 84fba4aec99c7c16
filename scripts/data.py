"""Text as bytes: what is trained on, what is held out, and which batch a rank draws when."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HOLD_OUT_EVERY = 20  # 5 %
MAX_BYTES_STDLIB = 16 * 2**20
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}


class Text(NamedTuple):
    """Two disjoint pieces of text, uint8."""

    train: np.ndarray
    validation: np.ndarray


class Batch(NamedTuple):
    """int64 [batch, seq]; targets are the inputs one byte later."""

    inputs: Tensor
    targets: Tensor


def load_text(path: str | None, seq_len: int) -> Text:
    """The text at `path`, or of Python's standard library.

    Raises:
        ValueError: the file cannot be read, or is too short for one sequence in each piece.
    """
    text = _split_standard_library() if path is None else _split_file(path)
    for piece, content in text._asdict().items():
        if len(content) < seq_len + 1:
            raise ValueError(
                f"data.path={path!r}: its {piece} part has {len(content)} bytes, and a sequence "
                f"needs data.seq_len + 1 = {seq_len + 1}; give a longer file or a smaller "
                "data.seq_len"
            )
    return text


def standard_library_files() -> list[Path]:
    """The .py files of the running Python's standard library, without its tests, by path."""
    root = Path(os.__file__).parent
    files: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - SKIPPED_DIRECTORIES
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Every 20th file is held out."""
    trained_on = [file for index, file in enumerate(files, 1) if index % HOLD_OUT_EVERY]
    return trained_on, files[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]


def draw_batch(text: np.ndarray, batch_size: int, seq_len: int, key: tuple[int, ...]) -> Batch:
    """Sequences from random places, which `key` alone decides: (seed, rank, step, microbatch)."""
    starts = np.random.default_rng(key).integers(0, len(text) - seq_len, size=batch_size)
    return _sequences_at(text, starts, seq_len)


def validation_batches(
    text: np.ndarray, batch_size: int, seq_len: int, num_batches: int, rank: int, world_size: int
) -> list[Batch]:
    """This rank's batches out of sequences that are evenly spaced over the held-out text."""
    count = num_batches * batch_size * world_size
    starts = np.linspace(0, len(text) - seq_len - 1, count).astype(np.int64)
    mine = starts[rank::world_size].reshape(num_batches, batch_size)
    return [_sequences_at(text, batch_starts, seq_len) for batch_starts in mine]


def _split_standard_library() -> Text:
    files: list[Path] = []
    total_bytes = 0
    for file in standard_library_files():
        total_bytes += file.stat().st_size
        if total_bytes > MAX_BYTES_STDLIB:
            break
        files.append(file)
    return Text(*(_as_array(b"".join(f.read_bytes() for f in part)) for part in split_files(files)))


def _split_file(path: str) -> Text:
    try:
        content = _as_array(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(
            f"data.path={path!r} cannot be read ({error.strerror}); give the path of a text file, "
            "or leave it out to train on Python's standard library"
        ) from error
    boundary = len(content) - len(content) // HOLD_OUT_EVERY
    return Text(content[:boundary], content[boundary:])


def _as_array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, dtype=np.uint8)


def _sequences_at(text: np.ndarray, starts: np.ndarray, seq_len: int) -> Batch:
    sequences = text[starts[:, None] + np.arange(seq_len + 1)]  # [batch, seq_len + 1]
    tokens = torch.from_numpy(sequences.astype(np.int64))
    return Batch(tokens[:, :-1], tokens[:, 1:])
