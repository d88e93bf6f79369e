"""Lists, reads, writes and deletes checkpoints in folders."""

import logging
import re

from levanter.base.input_limits import JSON_BYTES, read_bounded
from levanter.checkpoint.errors import MissingCheckpointError, UnreadableCheckpointError
from levanter.checkpoint.metadata import DamagedMetadataError, ForeignMetadataError, format_document, parse_document
from levanter.checkpoint.refs import ARRAYS_PREFIX, METADATA, CheckpointRef, step_path
from levanter.io.atomic import atomic_write
from levanter.io.paths import base_name, exists, filesystem, join, open_read

log = logging.getLogger(__name__)
OCDBT = "manifest.ocdbt"
"""A file that every TensorStore folder contains; in our checkpoints such a folder is one level below."""
_STEP = re.compile(r"^step-(\d+)$")


def find_checkpoints(base: str, *more: str) -> tuple[CheckpointRef, ...]:
    """All complete checkpoints below one or several bases, by ascending step; those that are damaged left out.

    Where two bases hold the same step, the checkpoint saved last comes last. A base that does not exist holds none.
    """
    checkpoints: list[CheckpointRef] = []
    # A damaged checkpoint must not hide the others from retention or from a listing.
    for path in (path for folder in (base, *more) for path in step_folders(folder)):
        try:
            ref = read_ref(path)
        except UnreadableCheckpointError as error:
            log.warning("%s", error)
            continue
        if ref is not None:
            checkpoints.append(ref)
    return tuple(sorted(checkpoints, key=_age))


def latest(base: str, *more: str) -> CheckpointRef | None:
    """The complete checkpoint of the highest step, or None.

    Raises:
        UnreadableCheckpointError: it is damaged or not ours; the message names the one before.
    """
    paths = [path for folder in (base, *more) for path in step_folders(folder)]
    steps = sorted({_folder_step(path) for path in paths}, reverse=True)
    for step in steps:
        # A damaged newest checkpoint is raised, not skipped: resuming from an older one must be the user's decision.
        candidates = [ref for path in paths if _folder_step(path) == step and (ref := read_ref(path)) is not None]
        if candidates:
            return _with_arrays(max(candidates, key=_age))
    return None


def checkpoint_at(path: str) -> CheckpointRef:
    """The checkpoint that a user named: by its own folder, or by a base, which means the latest one in it.

    Raises:
        MissingCheckpointError: there is none; the message lists what the folder has instead.
        UnreadableCheckpointError: it is damaged or not ours.
    """
    ref = read_ref(path)
    if ref is not None:
        return _with_arrays(ref)
    ref = latest(path)
    if ref is not None:
        return ref
    if not exists(path):
        raise MissingCheckpointError(f"{path}: no such folder; a checkpoint (step-<N>) or its parent is expected")
    names = [name for name, _ in list_entries(path)]
    if OCDBT in names:
        raise UnreadableCheckpointError(upstream_message(path))
    if any(name.startswith(ARRAYS_PREFIX) for name in names):
        others = _intact_sibling_message(path)
        raise MissingCheckpointError(f"{path}: an incomplete checkpoint; it has no {METADATA}; {others}")
    incomplete = [name for name in names if _STEP.match(name)]
    contents = f"only incomplete ones ({', '.join(incomplete)})" if incomplete else ", ".join(names[:5]) or "nothing"
    raise MissingCheckpointError(f"{path}: no complete checkpoint in this folder, which has {contents}")


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
    except OSError as error:
        raise unreadable_error(path, METADATA, f"cannot be read ({error.strerror or error})") from error
    try:
        return parse_document(path, text)
    except ForeignMetadataError as error:
        if error.upstreams:
            raise UnreadableCheckpointError(upstream_message(path)) from error
        raise unreadable_error(path, METADATA, str(error)) from error
    except DamagedMetadataError as error:
        raise unreadable_error(path, METADATA, f"damaged: {error}") from error


def write_ref(ref: CheckpointRef) -> None:
    """Writes `metadata.json`, which makes a checkpoint complete."""
    # One atomic rename: at every moment the file is absent, the old one, or the new one.
    with atomic_write(join(ref.path, METADATA)) as file:
        file.write(format_document(ref))


def unreadable_error(path: str, file: str, why: str) -> UnreadableCheckpointError:
    """The error of a checkpoint that cannot be used: which, why, and which other one is intact.

    Args:
        path: its folder.
        file: the file or folder in it that is damaged.
        why: what is wrong with it.
    """
    step = f"the checkpoint of step {_folder_step(path)}" if _STEP.match(base_name(path)) else "the checkpoint"
    return UnreadableCheckpointError(
        f"{join(path, file)}: {why}; {step} cannot be used; {_intact_sibling_message(path)}"
    )


def _intact_sibling_message(path: str) -> str:
    """The newest other checkpoint in the same folder, in words."""
    name = base_name(path)
    base = path.rstrip("/")[: -len(name)] or "."
    for other in reversed(step_folders(base)):
        if base_name(other) == name:
            continue
        ref = _read_intact(other)
        if ref is not None:
            return (
                f"the newest intact one beside it is of step {ref.step}: name {ref.path}, or move the damaged one away "
                "to have it found"
            )
    return "there is no other intact one beside it"


def _read_intact(path: str) -> CheckpointRef | None:
    """The checkpoint in a folder, None where there is none or it is damaged."""
    try:
        with open_read(join(path, METADATA)) as file:
            ref = parse_document(path, read_bounded(file, JSON_BYTES, where=path))
    except (OSError, ValueError):
        return None
    # Without the manifest of the store nothing of the arrays can be read.
    return ref if exists(join(ref.arrays_path, OCDBT)) else None


def _with_arrays(ref: CheckpointRef) -> CheckpointRef:
    """The checkpoint, if its arrays are there; damage is detected when they are read."""
    # Only the manifest is looked for here; reading every file to verify it would take as long as a restore.
    if not exists(join(ref.arrays_path, OCDBT)):
        raise unreadable_error(ref.path, f"{ref.arrays}/{OCDBT}", "missing; the arrays begin with it")
    return ref


def _age(ref: CheckpointRef) -> tuple[int, float]:
    return ref.step, ref.saved_at


def _folder_step(path: str) -> int:
    return int(base_name(path).removeprefix("step-"))


def step_folders(base: str) -> list[str]:
    """The folders below a base that are named like checkpoints, complete or not, by ascending step."""
    steps = [
        int(match.group(1)) for name, is_folder in list_entries(base) if is_folder and (match := _STEP.match(name))
    ]
    # By number, not by name: `step-1000` follows `step-200`.
    return [step_path(base, step) for step in sorted(steps)]


def list_entries(path: str) -> list[tuple[str, bool]]:
    """The entries of a folder, sorted: (name, whether it is a folder). Empty where there is no such folder."""
    fs, name = filesystem(path)
    # fsspec caches listings of remote folders; another process may have written since.
    fs.invalidate_cache()
    try:
        entries = fs.ls(name, detail=True) if fs.isdir(name) else []
    except FileNotFoundError:
        return []
    return sorted((base_name(entry["name"]), entry["type"] == "directory") for entry in entries)


def delete(path: str) -> None:
    """Deletes a checkpoint: `metadata.json` first, so that no moment shows a part of it as complete."""
    fs, name = filesystem(path)
    # From here on the folder is incomplete: if deleting is interrupted, the next `sweep` removes the rest.
    marker = f"{name}/{METADATA}"
    if fs.exists(marker):
        fs.rm_file(marker)
    fs.rm(name, recursive=True)


def sweep(base: str) -> list[str]:
    """Deletes what interrupted saves left below a base, and returns the paths.

    That is: `step-<N>` folders without `metadata.json` that hold nothing but arrays and temporary files of ours, and
    folders of arrays in complete checkpoints that their `metadata.json` does not name.
    """
    deleted = []
    for path in step_folders(base):
        names = [name for name, _ in list_entries(path)]
        try:
            ref = read_ref(path)
        except UnreadableCheckpointError as error:
            # The user decides whether it is deleted.
            log.warning("%s", error)
            continue
        fs, name = filesystem(path)
        # A folder with any other file in it may be the user's and is left alone.
        if ref is None and all(map(_is_ours, names)):
            fs.rm(name, recursive=True)
            deleted.append(path)
        # A complete checkpoint may still hold the arrays of an earlier save of the same step, or of a killed attempt.
        elif ref is not None:
            for entry in names:
                if _is_ours(entry) and entry != ref.arrays:
                    fs.rm(f"{name}/{entry}", recursive=True)
                    deleted.append(join(path, entry))
    return deleted


def _is_ours(name: str) -> bool:
    # Arrays and digests of ours, and the temporary names under which they and metadata.json are written.
    return name.startswith((ARRAYS_PREFIX, f".{ARRAYS_PREFIX}", f".{METADATA}."))


def upstream_message(path: str) -> str:
    """The message about a checkpoint that upstream's Levanter wrote."""
    return (
        f"{path}: a checkpoint of upstream Levanter (TensorStore), which cannot be read here; export it where upstream "
        f"is installed (python -m levanter.main.export_lm_to_hf --checkpoint_path {path} --output_dir FOLDER) "
        "and use that folder: hf_checkpoint evaluates it, initialize_from_hf continues training from it"
    )
