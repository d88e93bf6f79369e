"""Saves and loads checkpoints of any pytree of arrays, with the calls of earlier generations.

    save_checkpoint(model, training_state, 10, "checkpoints/step-10")        # early 2024
    save_checkpoint(state, 10, "checkpoints/step-10")                        # since
    model, training_state, step = load_checkpoint(model, training_state, "checkpoints")
    state = load_checkpoint(state, "checkpoints")

The result is a checkpoint of ours in the given folder, which `eval_lm`, exports and resumed runs read; checkpoints of
upstream's trainer are refused with an error that names them. Leaves that are not arrays (functions, strings) are not
saved but taken from the tree that is passed to the load. A save returns when the checkpoint is complete.
"""

import dataclasses
import datetime
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import mesh_in_scope
from haliax_ext.pytree import PyTree, is_named, leaves_with_paths, map_with_paths
from levanter.checkpoint import Checkpointer, CheckpointRef, RestoreTarget, checkpoint_at, restore
from levanter.checkpoint.checkpointer import CHUNK_BYTES
from levanter.checkpoint.discovery import read_ref, write_ref
from levanter.checkpoint.errors import MissingCheckpointError
from levanter.checkpoint.refs import ARRAYS_PREFIX, METADATA, now
from levanter.checkpoint.restore_specs import saved_leaf
from levanter.commands.model.saved_model import model_metadata
from levanter.io.paths import filesystem, is_remote
from levanter.mesh import MeshConfig, local_devices
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig

SAVE_SECONDS = 1200.0
Place = str | os.PathLike[str]


def save_checkpoint(*args: PyTree, **keys: PyTree) -> str:
    """Writes a checkpoint of `(model, training_state, step, path)`, or of `(tree, step, path)`.

    Args:
        args: as above.
        keys: the same by name (`model`, `training_state`, or `tree`; `step`, `checkpoint_path`), and upstream's
            `exist_ok`, `manager`, `commit_callback` (called without arguments on completion) and `is_temporary`.

    Returns:
        The path.

    Raises:
        ValueError: there are no arrays to save, or arguments are missing.
    """
    # Early 2024's form has two trees; in the later one, the second argument is the step.
    old = keys.keys() & {"model", "training_state"} or (len(args) > 1 and not _is_number(args[1]))
    names = ("model", "training_state", "step", "checkpoint_path") if old else ("tree", "step", "checkpoint_path")
    arguments = {**dict(zip((*names, "manager") if not old else names, args, strict=False)), **keys}
    if missing := [name for name in names if name not in arguments]:
        raise ValueError(f"save_checkpoint: missing {', '.join(missing)}")
    # The two trees become one, under the prefixes that `load_checkpoint` uses.
    tree = {name: arguments[name] for name in names[:2]} if old else arguments["tree"]
    path = os.fspath(arguments["checkpoint_path"])
    _write(tree, int(arguments["step"]), path, kind="temporary" if arguments.get("is_temporary") else "kept")
    if (callback := arguments.get("commit_callback")) is not None:
        callback()
    return path


def load_checkpoint(*args: PyTree, **keys: PyTree) -> PyTree:
    """Reads a checkpoint; `load_checkpoint(model, training_state, path)`, or `load_checkpoint(tree, path)`.

    Args:
        args: as above; the trees give the arrays to read and their shardings.
        keys: the same by name; `discover_latest`: whether the path may be a folder of checkpoints, of which the newest
            is read; `subpath`: the part of the checkpoint that the tree is; `axis_mapping` and `mesh`: the sharding of
            named arrays; `allow_partial`: whether arrays that the checkpoint lacks keep their values.

    Returns:
        (model, training_state, step), or the tree.

    Raises:
        MissingCheckpointError: there is no checkpoint.
        CheckpointMismatchError: the checkpoint has another tree; lists every difference.
    """
    old = keys.keys() & {"model", "training_state"} or (len(args) > 1 and not isinstance(args[1], str | os.PathLike))
    names = ("model", "training_state", "checkpoint_path") if old else ("tree", "checkpoint_path")
    arguments = {**dict(zip(names, args, strict=False)), **keys}
    path = os.fspath(arguments["checkpoint_path"])
    ref = checkpoint_at(path) if arguments.get("discover_latest", True) else _exactly(path)
    options = {
        "mesh": arguments.get("mesh"),
        "mapping": arguments.get("axis_mapping"),
        "partial": bool(arguments.get("allow_partial", False)),
    }
    if not old:
        return _read(ref, arguments["tree"], prefix=arguments.get("subpath"), **options)
    model = _read(ref, arguments["model"], prefix="model", **options)
    # A caller that has no state yet passes None and gets None.
    if (state := arguments["training_state"]) is not None:
        state = _read(ref, state, prefix="training_state", **options)
    return model, state, ref.step


def load_checkpoint_or_initialize(
    init_fn: Callable[..., PyTree],
    checkpoint_path: Place,
    *,
    subpath: str | None = None,
    discover_latest: bool = True,
    axis_mapping: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    is_checkpointed: PyTree = True,
    donate_args: PyTree = True,
    donate_kwargs: PyTree = None,
    do_load: bool | None = None,
    allow_partial: bool = False,
) -> Callable[..., PyTree]:
    """A function like `init_fn` that reads what a checkpoint has, and initializes only the rest.

    Args:
        init_fn: returns a tree; it is called under `jit`.
        checkpoint_path: a checkpoint, or a folder of them if `discover_latest`.
        subpath: the part of the checkpoint that the tree is.
        axis_mapping, mesh: the sharding of named arrays.
        is_checkpointed: a filter: true, or a tree of booleans like the result or a prefix of it.
        donate_args, donate_kwargs: accepted for compatibility; arguments are left as they are.
        do_load: whether there must be a checkpoint (true), or none is read (false); None reads it if there is one.
        allow_partial: whether arrays that the checkpoint lacks are initialized.

    Raises (by the function):
        MissingCheckpointError: there is no checkpoint, and `do_load` is true.
        CheckpointMismatchError: the checkpoint has another tree; lists every difference.
    """
    del donate_args, donate_kwargs

    def load(*args: PyTree, **keys: PyTree) -> PyTree:
        path = os.fspath(checkpoint_path)
        try:
            ref = None if do_load is False else checkpoint_at(path) if discover_latest else _exactly(path)
        except MissingCheckpointError:
            if do_load:
                raise
            ref = None
        shapes = eqx.filter_eval_shape(init_fn, *args, **keys)
        loaded = eqx.filter(shapes, lambda _: False)
        if ref is not None:
            wanted = eqx.filter(shapes, is_checkpointed)
            read = _read(ref, wanted, prefix=subpath, mesh=mesh, mapping=axis_mapping, partial=allow_partial)
            # What a partial checkpoint lacks is a shape still.
            loaded = eqx.filter(read, eqx.is_array)
        missing = jax.tree.map(lambda x: x is None, loaded, is_leaf=lambda x: x is None)

        def initialized(*args: PyTree, **keys: PyTree) -> PyTree:
            return eqx.filter(init_fn(*args, **keys), missing)

        # Under jit, so that nothing is computed for what was read; Haliax's needs a mesh.
        jit = eqx.filter_jit if axis_mapping is None else partial(hax.named_jit, axis_resources=axis_mapping)
        return eqx.combine(loaded, jit(initialized)(*args, **keys))

    return load


def load_metadata(checkpoint_path: Place, fs: object = None) -> dict[str, Any]:
    """The metadata of a checkpoint: `step`, `timestamp`, `is_temporary`, and the further metadata of its run.

    Raises:
        MissingCheckpointError: there is no checkpoint.
    """
    del fs
    ref = _exactly(os.fspath(checkpoint_path))
    timestamp = datetime.datetime.fromtimestamp(ref.saved_at, datetime.UTC).isoformat()
    return {**ref.metadata, "step": ref.step, "timestamp": timestamp, "is_temporary": ref.kind == "temporary"}


def tree_serialize_leaves_tensorstore(checkpoint_dir: Place, pytree: PyTree, *_: object, **__: object) -> None:
    """Writes the arrays of a tree to a folder, as a checkpoint of step 0."""
    _write(pytree, 0, os.fspath(checkpoint_dir), kind="kept")


def tree_deserialize_leaves_tensorstore(
    checkpoint_dir: Place,
    pytree: PyTree,
    axis_mapping: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    manager: object = None,
    *,
    allow_missing: bool = False,
) -> PyTree:
    """Reads the arrays of a tree from a folder, with the shardings of the tree's arrays."""
    del manager
    ref = _exactly(os.fspath(checkpoint_dir))
    return _read(ref, pytree, mesh=mesh, mapping=axis_mapping, partial=allow_missing)


def fs_and_plain_path(path: str, fs: PyTree = None) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path in it."""
    path_fs, plain = filesystem(path)
    return (path_fs if fs is None else fs), plain


# --- members of `Checkpointer` ---


def new_checkpointer(
    initialize: Callable[..., None],
    checkpointer: Checkpointer,
    base_path: str,
    save_interval: datetime.timedelta | None = None,
    step_policies: Sequence[Any] = (),
    *,
    temporary_base_path: str | None = None,
    dt_now_injection: Callable[[], datetime.datetime] | None = None,
    delete_old_temp_checkpoints: bool = True,
    **ours: PyTree,
) -> None:
    """`Checkpointer(base, interval, policies)`: deletes temporary checkpoints once a newer one is complete."""
    if dt_now_injection is not None:
        # Tests of upstream inject a clock; ours counts seconds since the epoch.
        ours["clock"] = lambda: dt_now_injection().timestamp()
    initialize(
        checkpointer,
        base_path,
        keep=[(policy.every, policy.until) for policy in step_policies],
        save_interval_seconds=None if save_interval is None else save_interval.total_seconds(),
        # Upstream keeps no temporary checkpoint beside a newer one; our default keeps one.
        keep_last_temporary=0,
        temporary_base=temporary_base_path,
        delete_old_temporary=delete_old_temp_checkpoints,
        **ours,
    )


def on_step(checkpointer: Checkpointer) -> Callable[..., None]:
    """`checkpointer.on_step(info)`, or `on_step(tree=…, step=…)`: saves if a save is due, and waits for it."""

    def save_where_due(
        info: PyTree = None, *, tree: PyTree = None, step: int | None = None, force: bool = False
    ) -> None:
        now_at = int(info.step if step is None else step)
        # Step 0 is the initial state, which upstream never saves unless forced.
        if not force and (now_at == 0 or not checkpointer.due(now_at)):
            return
        arrays = _arrays(info.state if tree is None else tree)
        checkpointer.save(now_at, arrays, {}, force=force)
        checkpointer.wait()

    return save_where_due


def load_function(checkpointer: Checkpointer) -> Callable[..., Any]:
    """`checkpointer.load_checkpoint(tree, path)`: without a path, the newest checkpoint of this object."""

    def load(tree: PyTree, path: Place | None = None, **keys: PyTree) -> PyTree:
        newest = checkpointer.newest
        if path is None and newest is None:
            raise MissingCheckpointError("load_checkpoint: this object has saved nothing; pass a path")
        return load_checkpoint(tree, newest.path if path is None and newest is not None else path, **keys)

    return load


def wait_until_finished(checkpointer: Checkpointer) -> Callable[[], None]:
    """`checkpointer.wait_until_finished()`."""
    return checkpointer.wait


# --- trees ---


def _is_number(value: PyTree) -> bool:
    return isinstance(value, int | np.integer) or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0)


def _exactly(path: str) -> CheckpointRef:
    ref = read_ref(path)
    if ref is None:
        raise MissingCheckpointError(f"{path}: no complete checkpoint ({METADATA}) in this folder")
    return ref


def _array(leaf: PyTree) -> jax.Array | None:
    """The array to save for a leaf; None if nothing is saved."""
    value = leaf.array if is_named(leaf) else leaf
    # Typed PRNG keys cannot be written; their uint32 data can.
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    if isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        value = jnp.asarray(value)
    # Arrays without elements are skipped, since the array format has no place for them.
    return value if isinstance(value, jax.Array) and value.size else None


def _arrays(tree: PyTree) -> dict[str, jax.Array]:
    arrays = {path or "value": _array(leaf) for path, leaf in leaves_with_paths(tree)}
    return {path: array for path, array in arrays.items() if array is not None}


def _write(tree: PyTree, step: int, path: str, *, kind: PyTree) -> None:
    # Imported late: Orbax takes half a second to import.
    from levanter.checkpoint.orbax_io import ArrayWriter

    arrays = _arrays(tree)
    if not arrays:
        raise ValueError(f"{path}: no arrays to save")
    model = tree.get("model") if isinstance(tree, dict) else getattr(tree, "model", None)
    if not is_remote(path):
        Path(filesystem(path)[1]).mkdir(parents=True, exist_ok=True)
    ref = CheckpointRef(
        path=path,
        step=step,
        kind=kind,
        metadata=MappingProxyType(_metadata(model)),
        leaves=MappingProxyType({name: saved_leaf(array.shape, array.dtype) for name, array in arrays.items()}),
        arrays=ARRAYS_PREFIX + secrets.token_hex(4),
        saved_at=now(),
    )
    writer = ArrayWriter(timeout_seconds=SAVE_SECONDS, chunk_bytes=CHUNK_BYTES)
    try:
        writer.start(ref.arrays_path, arrays)
        digests = writer.wait()
    # The writer has threads, which must end even if a write fails.
    finally:
        writer.close()
    if jax.process_count() == 1:
        # `Checkpointer` collects the digests of several processes; without them, reading reports "unverified".
        ref = dataclasses.replace(ref, digests=MappingProxyType(digests))
    # The reference is the last file: without it, the folder is not a checkpoint.
    if jax.process_index() == 0:
        write_ref(ref)


def _metadata(model: PyTree) -> dict[str, Any]:
    """The metadata that lets a model be read without a configuration; empty for other trees."""
    if not (isinstance(model, LmHeadModel) and isinstance(model.config, LmConfig)):
        return {}
    return model_metadata(dataclasses.replace(model.config, vocab_size=model.Vocab.size), tokenizer=None)


def _read(
    ref: CheckpointRef,
    tree: PyTree,
    *,
    prefix: str | None = None,
    mesh: Mesh | None,
    mapping: Mapping[str, Any] | None,
    partial: bool,
) -> PyTree:
    """Replaces the arrays of a tree with those of a checkpoint."""
    found_mesh = mesh_in_scope() if mesh is None else mesh

    def target_sharding(leaf: PyTree, value: PyTree) -> jax.sharding.Sharding:
        if mapping is not None and isinstance(found_mesh, Mesh) and is_named(leaf):
            return NamedSharding(found_mesh, AxisMapping(mapping).spec(axis.name for axis in leaf.axes))
        # Each array goes where the tree's array is; Python numbers
        # and shapes without a sharding go to the first device.
        sharding = getattr(value, "sharding", None)
        return SingleDeviceSharding(local_devices(MeshConfig()).devices[0]) if sharding is None else sharding

    def inside(path: str) -> str:
        return ".".join(part for part in (prefix, path) if part) or "value"

    targets: dict[str, RestoreTarget] = {}
    for path, leaf in leaves_with_paths(tree):
        value = leaf.array if is_named(leaf) else leaf
        value = value if isinstance(value, jax.ShapeDtypeStruct) else _array(leaf)
        # With `partial`, arrays that the checkpoint lacks are left out of the request and so keep their values.
        if value is not None and not (partial and inside(path) not in ref.leaves):
            targets[inside(path)] = RestoreTarget(
                shape=value.shape, dtype=np.dtype(value.dtype), sharding=target_sharding(leaf, value)
            )
    # A tree may be a part of what was saved, so further arrays in the checkpoint are no error.
    arrays = restore(ref, targets, unexpected="skip")

    def put(path: str, leaf: PyTree) -> PyTree:
        array = arrays.get(inside(path))
        if array is None:
            return leaf
        if is_named(leaf):
            return type(leaf)(array, leaf.axes)
        if isinstance(leaf, bool | int | float | complex):
            # Leaves get back the Python or NumPy type that they had in the tree.
            return type(leaf)(array.item())
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return np.asarray(array) if isinstance(leaf, np.ndarray) else array

    return map_with_paths(put, tree)
