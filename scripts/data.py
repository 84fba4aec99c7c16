"""What is trained on, what is held out, and which batch a rank draws when: text, or images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from train_config import DataConfig

DIGITS = "digits"  # the `data.path` of images
DIGITS_HOLD_OUT_EVERY = 5  # 20 %
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


class Batch(NamedTuple):
    """What goes into a model, and the int64 class of each prediction that comes out."""

    inputs: Tensor
    targets: Tensor


class Text(NamedTuple):
    """Two disjoint pieces of text, uint8. Each byte predicts the next one."""

    train: np.ndarray
    validation: np.ndarray

    def training_batch(self, config: DataConfig, key: tuple[int, ...]) -> Batch:
        """Sequences from random places that `key` alone decides: (seed, rank, step, microbatch)."""
        end = len(self.train) - config.seq_len
        starts = np.random.default_rng(key).integers(0, end, size=config.batch_size)
        return _sequences_at(self.train, starts, config.seq_len)

    def validation_batches(
        self, config: DataConfig, num_batches: int, rank: int, world_size: int
    ) -> list[Batch]:
        """This rank's batches out of sequences that are evenly spaced over the held-out text."""
        end = len(self.validation) - config.seq_len - 1
        starts = _evenly_spaced(end, config.batch_size, num_batches, rank, world_size)
        return [_sequences_at(self.validation, batch, config.seq_len) for batch in starts]


class Digits(NamedTuple):
    """Images `[samples, 1, 8, 8]` float32, 0 to 1, and the digits 0 to 9 that they show."""

    train: Batch
    validation: Batch

    def training_batch(self, config: DataConfig, key: tuple[int, ...]) -> Batch:
        """Random images that `key` alone decides."""
        count = len(self.train.targets)
        return self._chosen(
            self.train, np.random.default_rng(key).integers(0, count, size=config.batch_size)
        )

    def validation_batches(
        self, config: DataConfig, num_batches: int, rank: int, world_size: int
    ) -> list[Batch]:
        """This rank's batches out of evenly spaced held-out images."""
        end = len(self.validation.targets) - 1
        chosen = _evenly_spaced(end, config.batch_size, num_batches, rank, world_size)
        return [self._chosen(self.validation, batch) for batch in chosen]

    @staticmethod
    def _chosen(samples: Batch, indices: np.ndarray) -> Batch:
        return Batch(*(tensor[torch.from_numpy(indices)] for tensor in samples))


def load_data(config: DataConfig) -> Text | Digits:
    """What `config` names; ValueError where it cannot be read."""
    return load_digits() if config.path == DIGITS else load_text(config.path, config.seq_len)


def load_digits() -> Digits:
    """The 1,797 handwritten digits that scikit-learn ships, every fifth held out."""
    from sklearn import datasets

    loaded = datasets.load_digits()
    images = torch.from_numpy(loaded.images).float().unsqueeze(1) / 16
    digits = torch.from_numpy(loaded.target).long()
    held_out = torch.arange(len(digits)) % DIGITS_HOLD_OUT_EVERY == DIGITS_HOLD_OUT_EVERY - 1
    return Digits(*(Batch(images[which], digits[which]) for which in (~held_out, held_out)))


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


def _evenly_spaced(
    end: int, batch_size: int, num_batches: int, rank: int, world_size: int
) -> np.ndarray:
    """`[num_batches, batch_size]` of this rank, out of numbers from 0 to `end`."""
    numbers = np.linspace(0, end, num_batches * batch_size * world_size).astype(np.int64)
    return numbers[rank::world_size].reshape(num_batches, batch_size)


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
