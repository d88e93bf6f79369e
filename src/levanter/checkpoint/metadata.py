"""`metadata.json`, the file that makes a checkpoint complete: written and parsed.

The file has a digest of its own, and every value in it is checked: a number that is not one, a shape with a negative
size or a folder outside the checkpoint is damage, and one error lists all of it.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from levanter.base.bounded_json import parse_json
from levanter.checkpoint.checksums import ArrayDigests
from levanter.checkpoint.refs import ARRAYS_PREFIX, CheckpointRef, Kind, SavedLeaf
from levanter.io.paths import base_name

FORMAT = "levanter-checkpoint"
VERSION, WITHOUT_DIGESTS = 2, 1
_DIGEST = "digest"
_STEP_FOLDER = re.compile(r"^step-(\d+)$")
_ARRAYS = re.compile(rf"^{ARRAYS_PREFIX}[0-9a-zA-Z_]+$")


class DamagedMetadataError(ValueError):
    """A `metadata.json` in our format with invalid values; the message lists all of them."""


class ForeignMetadataError(ValueError):
    """A `metadata.json` that this program did not write, or not in this version.

    Attributes:
        upstreams: whether upstream's Levanter wrote it.
    """

    def __init__(self, message: str, *, upstreams: bool = False):
        super().__init__(message)
        self.upstreams = upstreams


def format_document(ref: CheckpointRef) -> bytes:
    """The text of `metadata.json` for a checkpoint.

    Raises:
        TypeError, ValueError: `metadata` has something that JSON cannot hold.
    """
    content = {
        "format": FORMAT,
        "version": VERSION if ref.digests else WITHOUT_DIGESTS,
        "step": ref.step,
        "kind": ref.kind,
        "saved_at": ref.saved_at,
        "arrays": ref.arrays,
        "metadata": dict(ref.metadata),
        **({"files": dict(ref.files)} if ref.files else {}),
        "leaves": {
            path: {**_leaf_document(leaf), **_digests_document(leaf, ref.digests.get(path))}
            for path, leaf in sorted(ref.leaves.items())
        },
    }
    # The digest must be of the values that a reader gets: keys as text, tuples as lists.
    content = json.loads(json.dumps(content, indent=1, allow_nan=False))
    return (json.dumps({**content, _DIGEST: _digest(content)}, indent=1, allow_nan=False) + "\n").encode()


def _leaf_document(leaf: SavedLeaf) -> dict[str, Any]:
    used = {} if leaf.used is None else {"used": list(leaf.used)}
    return {"shape": list(leaf.shape), "dtype": leaf.dtype, **used}


def _digests_document(leaf: SavedLeaf, digests: ArrayDigests | None) -> dict[str, Any]:
    return {} if digests is None else {"chunk": list(digests.chunk), "digests": digests.in_order(leaf.shape)}


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of a document without its own: of its values, however they are laid out."""
    # Sorted keys and fixed separators: the same values have the same digest however the file is indented.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def parse_document(path: str, text: bytes) -> CheckpointRef:
    """The checkpoint that a folder's `metadata.json` describes.

    Args:
        path: the folder.
        text: of the file.

    Raises:
        DamagedMetadataError: it is ours and damaged.
        ForeignMetadataError: it is not ours.
    """
    try:
        content: object = parse_json(text.decode())
    except ValueError as error:
        raise DamagedMetadataError(f"no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ForeignMetadataError(f"not one of our checkpoints (a {type(content).__name__}, not a mapping)")
    fields = cast("dict[str, Any]", content)
    # Upstream's metadata.json has these two keys and no format.
    if "format" not in fields and {"step", "timestamp"} <= fields.keys():
        raise ForeignMetadataError("upstream's", upstreams=True)
    if fields.get("format") != FORMAT:
        raise ForeignMetadataError(
            f"not one of our checkpoints (format {fields.get('format')!r}, expected {FORMAT!r}); "
            f"checkpoints of other Levanter versions must be converted through a Hugging Face export"
        )
    version = fields.get("version")
    # `True == 1` in Python, and JSON has both.
    if version not in (VERSION, WITHOUT_DIGESTS) or isinstance(version, bool):
        raise ForeignMetadataError(f"version {version!r}, but this program reads {WITHOUT_DIGESTS} and {VERSION}")
    # Version 1 files may lack a digest; version 2 files without one have lost it.
    digest = fields.pop(_DIGEST, None)
    if (digest is not None or version == VERSION) and digest != _digest(fields):
        raise DamagedMetadataError("it is not what was written (digests differ)")
    problems = _problems(path, fields, digests=version == VERSION)
    if problems:
        raise DamagedMetadataError("; ".join(problems))
    leaves = {
        name: SavedLeaf(
            shape=tuple(leaf["shape"]), dtype=leaf["dtype"], used=tuple(leaf["used"]) if "used" in leaf else None
        )
        for name, leaf in fields["leaves"].items()
    }
    digests = {
        name: ArrayDigests.of(leaf["shape"], leaf["chunk"], leaf["digests"])
        for name, leaf in fields["leaves"].items()
        if version == VERSION
    }
    return CheckpointRef(
        path=path,
        step=fields["step"],
        kind=cast(Kind, fields["kind"]),
        metadata=MappingProxyType(fields["metadata"]),
        leaves=MappingProxyType(leaves),
        arrays=fields["arrays"],
        saved_at=float(fields["saved_at"]),
        digests=MappingProxyType(digests),
        # Checkpoints of earlier releases have none.
        files=MappingProxyType(fields.get("files", {})),
    )


def _problems(path: str, content: Mapping[str, Any], *, digests: bool) -> list[str]:
    """The invalid values, each with its key."""
    checks: dict[str, Callable[[object], bool]] = {
        "step": _is_count,
        "kind": lambda x: x in ("kept", "temporary"),
        "saved_at": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x),
        # A name, not a path that leads elsewhere.
        "arrays": lambda x: isinstance(x, str) and _ARRAYS.match(x) is not None,
        "metadata": lambda x: isinstance(x, dict),
        "leaves": lambda x: isinstance(x, dict) and bool(x),
    }
    problems = [f"no {key}" for key in checks if key not in content]
    problems += [
        f"{key}: {content[key]!r}"[:80] for key, good in checks.items() if key in content and not good(content[key])
    ]
    # The checks below need values of the right types.
    if problems:
        return problems
    named = _STEP_FOLDER.match(base_name(path))
    if named is not None and int(named[1]) != content["step"]:
        problems.append(f"step: {content['step']} in a folder of step {named[1]}")
    if (problem := _files_problem(content.get("files", {}))) is not None:
        problems.append(f"files: {problem}")
    for name, leaf in cast("dict[str, Any]", content["leaves"]).items():
        problem = _leaf_problem(leaf, digests=digests)
        if problem is not None:
            problems.append(f"leaves: {name}: {problem}")
    return problems[:10]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _leaf_problem(leaf: object, *, digests: bool) -> str | None:
    if not isinstance(leaf, dict):
        return f"{leaf!r}"[:80]
    fields = cast("dict[str, list[int]]", leaf)
    stored_digests = cast("dict[str, list[str]]", leaf).get("digests", [])
    shapes = [key for key in ("shape", "used", "chunk") if key in fields or key == "shape"]
    for key in shapes:
        sizes = fields.get(key)
        if not isinstance(sizes, list) or not all(map(_is_count, cast("list[object]", sizes))) or 0 in sizes:
            return f"{key}: {sizes!r}"[:80]
        if len(cast("list[object]", sizes)) != len(fields["shape"]):
            return f"{key}: {sizes!r}, of shape {fields['shape']!r}"[:120]
    if "used" in fields and any(part > whole for part, whole in zip(fields["used"], fields["shape"], strict=True)):
        return f"used: {fields['used']!r}, more than shape {fields['shape']!r}"
    if not isinstance(fields.get("dtype"), str):
        return f"dtype: {fields.get('dtype')!r}"
    if not digests:
        return None
    try:
        ArrayDigests.of(fields["shape"], fields["chunk"], stored_digests)
    except (KeyError, TypeError, ValueError) as error:
        return f"digests: {error}"[:120]
    return None


def _files_problem(files: object) -> str | None:
    """What is wrong with the digests of files in a `metadata.json`."""
    if not isinstance(files, Mapping):
        return f"{files!r}"[:80]
    for path, digest in files.items():
        # The names come from a file and become paths: they must stay below the folder of the arrays.
        inside = isinstance(path, str) and all(part not in ("", ".", "..") for part in path.split("/"))
        if not inside or not isinstance(digest, str):
            return f"{path!r}: {digest!r}"[:80]
    return None
