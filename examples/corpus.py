"""A byte corpus that every machine with Python already has: the standard library of the running interpreter.

The corpus is the concatenation of the sorted ``*.py`` files (about 12 MB). Its fingerprint belongs to the
recipe of a run: another Python version has other sources, which moves losses by a few tenths of a percent.

A batch is a pure function of (seed, step), so a run resumed at step s reads exactly what an uninterrupted run
would have read, without any sampler state in the checkpoint.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256
"""Token ids are bytes."""

_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Bytes to train on, and what identifies them."""

    data: torch.Tensor
    """All bytes, uint8, shape (bytes,)."""
    files: int
    """Number of source files."""
    fingerprint: str
    """First 16 hexadecimal digits of the SHA-256 of the bytes."""


@lru_cache(maxsize=1)
def standard_library() -> Corpus:
    """Read the sources of the running interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        # _sysconfigdata*.py records how this one interpreter was built: not the same bytes anywhere else.
        if not _SKIPPED & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    if not files:
        raise FileNotFoundError(f"no standard-library sources under {root}; use a Python that ships its *.py files")
    raw = b"".join(path.read_bytes() for path in files)
    data = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
    return Corpus(data=data, files=len(files), fingerprint=hashlib.sha256(raw).hexdigest()[:16])


class Batches:
    """Deterministic batches: sequence j of the run starts at (offset + j * stride) mod n.

    The stride is n / golden ratio, so that the start positions of any run of consecutive sequences cover the
    corpus almost evenly (a low-discrepancy sequence): files differ far more than their parts do, and even
    coverage takes most of that difference out of the noise of the loss.

    Args:
        corpus: the bytes.
        batch: sequences per step.
        context: bytes predicted per sequence.
        seed: chooses the offset.
        shuffled_from: first step whose bytes are passed through one fixed random permutation of the 256
            values (the "data" fault: same lengths, same entropy, another language); ``None`` for never.
    """

    def __init__(
        self, corpus: Corpus, *, batch: int, context: int, seed: int, shuffled_from: int | None = None
    ) -> None:
        if batch < 1 or context < 1:
            raise ValueError(f"batch and context must be >= 1; got batch={batch}, context={context}")
        self.batch, self.context, self.shuffled_from = batch, context, shuffled_from
        self._data = corpus.data
        self._starts = len(corpus.data) - context
        if self._starts < 1:
            raise ValueError(f"the corpus has {len(corpus.data)} bytes, fewer than one context of {context}")
        rng = np.random.default_rng(seed)
        self._offset = int(rng.integers(self._starts))
        self._stride = round(self._starts * _GOLDEN)
        self._permutation = torch.from_numpy(rng.permutation(VOCABULARY))
        self._window = torch.arange(context + 1)

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a 1-based step, both int64 of shape (batch, context)."""
        if step < 1:
            raise ValueError(f"step is 1-based; got {step}")
        first = (step - 1) * self.batch
        starts = [(self._offset + j * self._stride) % self._starts for j in range(first, first + self.batch)]
        tokens = self._data[torch.tensor(starts)[:, None] + self._window].long()
        if self.shuffled_from is not None and step >= self.shuffled_from:
            tokens = self._permutation[tokens]
        return tokens[:, :-1], tokens[:, 1:]
