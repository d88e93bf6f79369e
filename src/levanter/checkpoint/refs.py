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

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

from levanter.bounds import JSON_BYTES, parse_json, read_bounded
from levanter.checkpoint.errors import MissingCheckpointError, UnreadableCheckpointError
from levanter.io.atomic import atomic_write
from levanter.io.paths import base_name, exists, filesystem, is_remote, join, open_read

Kind = Literal["kept", "temporary"]

METADATA = "metadata.json"
FORMAT = "levanter-checkpoint"
VERSION = 1
ARRAYS_PREFIX = "arrays-"
_STEP = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    """The shape and dtype of one saved array.

    Attributes:
        shape: as it lies in the files.
        dtype: its name.
        used: the part of the shape that means something, where the rest may be padding; None where nothing is said.
    """

    shape: tuple[int, ...]
    dtype: str
    used: tuple[int, ...] | None = None

    @property
    def meant(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.shape if self.used is None else self.used

    def __str__(self) -> str:
        padded = f" in {list(self.shape)}" if self.meant != self.shape else ""
        return f"{self.dtype}{list(self.meant)}{padded}"


OCDBT = "manifest.ocdbt"
"""What a TensorStore folder contains; ours are one level below."""


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
    """

    path: str
    step: int
    kind: Kind
    metadata: Mapping[str, Any]
    leaves: Mapping[str, SavedLeaf] = field(repr=False)
    arrays: str = field(repr=False)
    saved_at: float = field(repr=False)

    @property
    def arrays_path(self) -> str:
        """The folder Orbax wrote."""
        return join(self.path, self.arrays)

    def __str__(self) -> str:
        return f"checkpoint of step {self.step} ({self.kind}) at {self.path}"


def step_path(base: str, step: int) -> str:
    """The folder of a step's checkpoint."""
    return join(base, f"step-{step}")


def find_checkpoints(base: str, *more: str) -> tuple[CheckpointRef, ...]:
    """All complete checkpoints below one or several bases, by ascending step.

    Where two bases hold the same step, the checkpoint saved last comes last. A base that does not exist holds none.

    Raises:
        UnreadableCheckpointError: a `metadata.json` is there but is damaged or not ours.
    """
    found = [ref for one in (base, *more) for path in step_folders(one) if (ref := read_ref(path)) is not None]
    return tuple(sorted(found, key=lambda ref: (ref.step, ref.saved_at)))


def latest(base: str, *more: str) -> CheckpointRef | None:
    """The complete checkpoint of the highest step, or None."""
    found = find_checkpoints(base, *more)
    return found[-1] if found else None


def checkpoint_at(path: str) -> CheckpointRef:
    """The checkpoint a user named: its own folder, or a base, which stands for its latest.

    Raises:
        MissingCheckpointError: there is none; the message says what is there instead.
        UnreadableCheckpointError: it is damaged or not ours.
    """
    found = read_ref(path) or latest(path)
    if found is not None:
        return found
    if not exists(path):
        raise MissingCheckpointError(f"{path}: no such folder; a checkpoint (step-<N>) or its parent is expected")
    names = [name for name, _ in entries_in(path)]
    if OCDBT in names:
        raise UnreadableCheckpointError(_upstreams(path))
    if any(name.startswith(ARRAYS_PREFIX) for name in names):
        raise MissingCheckpointError(f"{path}: an incomplete checkpoint; it has no {METADATA}")
    half = [name for name in names if _STEP.match(name)]
    told = f"only incomplete ones ({', '.join(half)})" if half else ", ".join(names[:5]) or "nothing"
    raise MissingCheckpointError(f"{path}: no complete checkpoint in this folder, which has {told}")


def step_folders(base: str) -> list[str]:
    """The folders below a base that are named like checkpoints, complete or not, by ascending step."""
    steps = [int(found.group(1)) for name, is_folder in entries_in(base) if is_folder and (found := _STEP.match(name))]
    return [step_path(base, step) for step in sorted(steps)]


def entries_in(path: str) -> list[tuple[str, bool]]:
    """What a folder holds, sorted: (name, whether it is a folder). Empty where there is no such folder."""
    fs, name = filesystem(path)
    # fsspec caches listings of remote folders; another process may have written since.
    fs.invalidate_cache()
    try:
        found = fs.ls(name, detail=True) if fs.isdir(name) else []
    except FileNotFoundError:
        return []
    return sorted((base_name(entry["name"]), entry["type"] == "directory") for entry in found)


def write_ref(ref: CheckpointRef) -> None:
    """Writes `metadata.json`, which makes a checkpoint complete."""
    with atomic_write(join(ref.path, METADATA)) as file:
        file.write(document(ref))


def document(ref: CheckpointRef) -> bytes:
    """What `metadata.json` says.

    Raises:
        TypeError, ValueError: `metadata` has something that JSON cannot hold.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": ref.step,
        "kind": ref.kind,
        "saved_at": ref.saved_at,
        "arrays": ref.arrays,
        "metadata": dict(ref.metadata),
        "leaves": {path: _leaf_document(leaf) for path, leaf in sorted(ref.leaves.items())},
    }
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _leaf_document(leaf: SavedLeaf) -> dict[str, Any]:
    used = {} if leaf.used is None else {"used": list(leaf.used)}
    return {"shape": list(leaf.shape), "dtype": leaf.dtype, **used}


def read_ref(path: str) -> CheckpointRef | None:
    """The checkpoint in a folder, or None where there is none that is complete.

    Raises:
        UnreadableCheckpointError: its `metadata.json` is damaged or not ours.
    """
    where = join(path, METADATA)
    try:
        with open_read(where) as file:
            text = read_bounded(file, JSON_BYTES, where=where)
    except FileNotFoundError:
        return None
    try:
        content = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise UnreadableCheckpointError(f"{where}: damaged ({error}); move {path} away to go on without it") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found is None and isinstance(content, dict) and {"step", "timestamp"} <= content.keys():
        raise UnreadableCheckpointError(_upstreams(path))
    if found != FORMAT:
        raise UnreadableCheckpointError(
            f"{where}: not one of our checkpoints (format {found!r}, expected {FORMAT!r}); "
            f"checkpoints of other Levanter versions must be converted through a Hugging Face export"
        )
    if content.get("version") != VERSION:
        raise UnreadableCheckpointError(f"{where}: version {content.get('version')}, but this program reads {VERSION}")
    try:
        return CheckpointRef(
            path=path,
            step=int(content["step"]),
            kind=cast(Kind, content["kind"]),
            metadata=MappingProxyType(content["metadata"]),
            leaves=MappingProxyType(
                {
                    name: SavedLeaf(
                        shape=tuple(leaf["shape"]),
                        dtype=leaf["dtype"],
                        used=tuple(leaf["used"]) if "used" in leaf else None,
                    )
                    for name, leaf in content["leaves"].items()
                }
            ),
            arrays=content["arrays"],
            saved_at=float(content["saved_at"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableCheckpointError(f"{where}: damaged ({error!r}); move {path} away to go on") from error


def _upstreams(path: str) -> str:
    """What is said of a checkpoint that upstream's Levanter wrote."""
    return (
        f"{path}: a checkpoint of upstream Levanter (TensorStore), which cannot be read here; export it where upstream "
        f"is installed (python -m levanter.main.export_lm_to_hf --checkpoint_path {path} --output_dir FOLDER) "
        "and use that folder: hf_checkpoint evaluates it, initialize_from_hf continues training from it"
    )


def delete(path: str) -> None:
    """Deletes a checkpoint: `metadata.json` first, so that no moment shows a part of it as complete."""
    fs, name = filesystem(path)
    marker = f"{name}/{METADATA}"
    if fs.exists(marker):
        fs.rm_file(marker)
    fs.rm(name, recursive=True)


def sweep(base: str) -> list[str]:
    """Deletes what interrupted saves left below a base, and returns the paths.

    That is: `step-<N>` folders without `metadata.json` that hold nothing but arrays and temporary files of ours, and
    folders of arrays in complete checkpoints that their `metadata.json` does not name.
    """
    gone = []
    for path in step_folders(base):
        names = [name for name, _ in entries_in(path)]
        ref = read_ref(path)
        fs, name = filesystem(path)
        if ref is None and all(map(_is_ours, names)):
            fs.rm(name, recursive=True)
            gone.append(path)
        elif ref is not None:
            for each in names:
                if _is_ours(each) and each != ref.arrays:
                    fs.rm(f"{name}/{each}", recursive=True)
                    gone.append(join(path, each))
    return gone


def _is_ours(name: str) -> bool:
    return name.startswith((ARRAYS_PREFIX, f".{METADATA}."))


def now() -> float:
    """The time of day, as `saved_at` has it."""
    return time.time()


def absolute(path: str) -> str:
    """A path as Orbax wants it: a URL, or absolute."""
    return path if is_remote(path) else filesystem(path)[1]
