"""Mesh axes and mappings: configuration, pure arithmetic on sizes, resolution for a model, and devices."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.mesh.config import MeshConfig as MeshConfig
    from levanter.mesh.config import ModelAxes as ModelAxes
    from levanter.mesh.devices import DeviceSet as DeviceSet
    from levanter.mesh.devices import describe_devices as describe_devices
    from levanter.mesh.devices import local_devices as local_devices
    from levanter.mesh.devices import mesh_report as mesh_report
    from levanter.mesh.devices import require_accelerator as require_accelerator
    from levanter.mesh.heads import model_sizes as model_sizes
    from levanter.mesh.mappings import ResolvedMesh as ResolvedMesh
    from levanter.mesh.resolve import resolve as resolve
    from levanter.mesh.sizes import resolve_sizes as resolve_sizes

export_on_demand(__name__)
