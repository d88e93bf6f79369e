"""Checkpoints as values, and how they are found again.

A *checkpoint* is a folder `step-<N>` below a *base* (a folder or URL). In it are the arrays, in a folder of their own
with a name of their own, and `metadata.json`, which is written last and names that folder:

    <base>/step-1200/metadata.json
    <base>/step-1200/arrays-5f0c19be/…          Orbax's files

So a checkpoint is *complete* when, and only when, `metadata.json` is there. It appears under its name by one rename,
after Orbax has given the arrays theirs. What a killed process leaves behind has no `metadata.json` and is not seen.
Writing a step anew puts new arrays beside the old ones, then replaces `metadata.json`: at every moment one of the two
is complete.

A checkpoint is *kept* (for ever) or *temporary* (until a newer one takes its place).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from levanter.checkpoint.checksums import ArrayDigests
from levanter.io.paths import filesystem, is_remote, join

Kind = Literal["kept", "temporary"]

METADATA = "metadata.json"
ARRAYS_PREFIX = "arrays-"


@dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """The shape and dtype of one saved array.

    Attributes:
        shape: its shape in the files.
        dtype: its name.
        used: the shape without padding; None where it was not recorded.
    """

    shape: tuple[int, ...]
    dtype: str
    used: tuple[int, ...] | None = None

    @property
    def meant(self) -> tuple[int, ...]:
        # Padding depends on the mesh; the rest is what two runs can compare.
        """The shape without padding."""
        return self.shape if self.used is None else self.used

    def __str__(self) -> str:
        padded = f" in {list(self.shape)}" if self.meant != self.shape else ""
        return f"{self.dtype}{list(self.meant)}{padded}"


@dataclass(frozen=True, kw_only=True)
class CheckpointRef:
    """One complete checkpoint.

    Attributes:
        path: its folder.
        step: the steps that were taken when it was saved.
        kind: whether it stays for ever.
        metadata: what the run saved beside the arrays.
        leaves: every array in it, by path.
        arrays: the name of the folder of the arrays.
        saved_at: when it was saved, in seconds since 1970.
        digests: of every array's chunks, by path; empty where it was saved without.
        files: digests of the small files beside the chunks, by path below the folder of the arrays; likewise.
    """

    path: str
    step: int
    kind: Kind
    metadata: Mapping[str, Any]
    leaves: Mapping[str, SavedLeaf] = field(repr=False)
    arrays: str = field(repr=False)
    saved_at: float = field(repr=False)
    digests: Mapping[str, ArrayDigests] = field(default_factory=dict[str, ArrayDigests], repr=False)
    files: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def arrays_path(self) -> str:
        """The folder Orbax wrote."""
        return join(self.path, self.arrays)

    def __str__(self) -> str:
        return f"checkpoint of step {self.step} ({self.kind}) at {self.path}"


def step_path(base: str, step: int) -> str:
    """The folder of a step's checkpoint."""
    return join(base, f"step-{step}")


def now() -> float:
    """The time of day, as `saved_at` has it."""
    return time.time()


def absolute(path: str) -> str:
    """A path as Orbax wants it: a URL, or absolute."""
    return path if is_remote(path) else filesystem(path)[1]
