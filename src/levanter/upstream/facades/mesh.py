"""Meshes and mappings without a model, for scripts of earlier generations.

A mapping is resolved for a model, because the meaning of `heads` depends on the model. These functions return the
mapping as written, `heads` included; `HFCheckpointConverter.load_pretrained` resolves it once it knows the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from haliax_ext.meshspec import MeshSpec
from haliax_ext.pytree import PyTree
from levanter.mesh import MeshConfig, local_devices, resolve_sizes
from levanter.mesh.config import DEFAULT_BATCH_AXES, DEFAULT_SHARED

Rules = dict[str, Any]


class EnteredMesh(Mesh):
    """A mesh for which `with mesh:` has the effect of `jax.set_mesh(mesh)`.

    JAX's own `with mesh:` sets the older resource environment, in which partition specs without a mesh are refused.
    """

    _mesh: Mesh
    _entered: list[Any]

    @classmethod
    def of(cls, mesh: Mesh) -> "EnteredMesh":
        """A mesh that can be entered."""
        entered = object.__new__(cls)  # JAX's constructor returns equal meshes as one object
        # The attributes that JAX's C++ code and its caches read from a mesh.
        for name in ("devices", "axis_names", "axis_types", "size"):
            object.__setattr__(entered, name, getattr(mesh, name))
        object.__setattr__(entered, "_mesh", mesh)
        object.__setattr__(entered, "_entered", [])
        return entered

    def __eq__(self, other: object) -> bool:
        # Equal to the wrapped mesh, so that shardings and compilation caches treat them as one.
        return getattr(other, "_mesh", other) is self._mesh

    def __hash__(self) -> int:
        return hash(self._mesh)

    def __enter__(self) -> "EnteredMesh":
        scope = jax.set_mesh(self._mesh)
        scope.__enter__()
        # A stack, since the same mesh may be entered again inside its own scope.
        self._entered.append(scope)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)


def device_mesh(config: MeshConfig) -> EnteredMesh:
    """The mesh of a config on the devices of this run."""
    devices = local_devices(config)
    spec = resolve_sizes(config, devices=len(devices.devices), granules=devices.granules)
    return EnteredMesh.of(spec.build(devices.devices))


def sizes(config: MeshConfig) -> MeshSpec:
    """The abstract mesh of a config, for the devices of this run."""
    devices = local_devices(config)
    return resolve_sizes(config, devices=len(devices.devices), granules=devices.granules)


def compute_mapping(config: MeshConfig) -> Rules:
    """Logical axis → mesh axes of activations, with `heads` as written."""
    batch = config.batch_axis_name
    rules: Rules = {} if batch is None else {batch: DEFAULT_BATCH_AXES}
    # Later entries win: defaults, batch, shared rules, then the rules for activations.
    return _plain({**DEFAULT_SHARED, **rules, **config.shared_mapping, **config.compute_mapping})


def parameter_mapping(config: MeshConfig) -> Rules:
    """Logical axis → mesh axes of parameters, with `heads` as written."""
    return _plain({**DEFAULT_SHARED, **config.shared_mapping, **config.param_mapping})


def _plain(rules: Mapping[str, Any]) -> Rules:
    out: Rules = {}
    for name, value in rules.items():
        axes = (value,) if isinstance(value, str) else tuple(value or ())
        if axes:
            # Upstream's form: a single mesh axis is a string, several are a tuple, none is left out.
            out[name] = axes[0] if len(axes) == 1 else axes
    return out


def axis_shapes(config: MeshConfig) -> Callable[[int, int], tuple[dict[str, int], dict[str, int]]]:
    """`mesh.axis_shapes(num_devices, num_slices)`: sizes inside slices, and across them."""

    def shapes(num_devices: int, num_slices: int) -> tuple[dict[str, int], dict[str, int]]:
        spec = resolve_sizes(config, devices=num_devices, granules=num_slices)
        inside = {name: size for name, size in spec.axes if name not in spec.dcn}
        return inside, {name: size for name, size in spec.axes if name in spec.dcn}

    return shapes


def create_fsdp_mesh(
    replica_ici_axis_size: int,
    data_ici_axis_size: int,
    model_axis_size: int,
    replica_dcn_axis_size: int = 1,
    data_dcn_axis_size: int = 1,
) -> Mesh:
    """The mesh of the 2025 generation: axes `replica`, `data` and `model`."""
    axes = {"replica": replica_ici_axis_size, "data": data_ici_axis_size, "model": model_axis_size}
    dcn = {"replica_dcn": replica_dcn_axis_size}
    if data_dcn_axis_size > 1:
        dcn["data_dcn"] = data_dcn_axis_size
    return device_mesh(MeshConfig(axes=axes, dcn_axes=dcn))


def parameter_count(model: PyTree) -> int:
    """The number of elements of all arrays of a tree."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape"))
