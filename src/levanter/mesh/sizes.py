"""Mesh axis sizes by pure arithmetic: `-1` absorbs what is left, products must equal the devices there are."""

import math
from collections.abc import Mapping

from haliax_ext.errors import MeshError
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.config import DEFAULT_AXES, DEFAULT_DCN_AXES, MeshConfig


def resolve_sizes(config: MeshConfig, *, devices: int, granules: int = 1) -> MeshSpec:
    """The mesh of `config` on `devices` devices that form `granules` granules (slices, or processes).

    The order of the axes is ICI first, DCN last, defaults before the user's own.

    Raises:
        MeshError: an axis in both groups, two absorbing axes, or products that do not match; every factor is listed.
    """
    if devices < 1 or granules < 1 or devices % granules:
        raise MeshError(f"{devices} devices do not form {granules} equal {config.granule}s")
    axes = _merged(DEFAULT_AXES, config.axes)
    dcn_axes = _merged(DEFAULT_DCN_AXES, config.dcn_axes)
    if both := sorted(axes.keys() & dcn_axes.keys()):
        raise MeshError(
            f"mesh axis {', '.join(both)} is in both axes (inside a {config.granule}) and dcn_axes (across them)",
            suggestion=f"give one of them another name, e.g. dcn_axes: {{{both[0]}_dcn: -1}}, "
            f"and map logical axes to [{both[0]}_dcn, {both[0]}]",
        )
    inside = _absorb(axes, devices // granules, group="axes", what=f"devices in one {config.granule}")
    across = _absorb(dcn_axes, granules, group="dcn_axes", what=f"{config.granule}s")
    return MeshSpec(axes=(*inside.items(), *across.items()), dcn=tuple(across), granule=config.granule)


def _merged(defaults: Mapping[str, int], given: Mapping[str, int]) -> dict[str, int]:
    merged = {**defaults, **given}
    # A default absorber steps back when the user named another one and did not mention it.
    if any(size == -1 for size in given.values()):
        for name, size in defaults.items():
            if size == -1 and name not in given:
                merged[name] = 1
    return merged


def _absorb(sizes: Mapping[str, int], total: int, *, group: str, what: str) -> dict[str, int]:
    if wrong := {name: size for name, size in sizes.items() if size != -1 and size < 1}:
        raise MeshError(f"{group}: sizes are positive, or -1 for what is left; got {wrong}")
    absorbing = [name for name, size in sizes.items() if size == -1]
    if len(absorbing) > 1:
        raise MeshError(f"{group}: only one axis can be -1, got {', '.join(absorbing)}")
    fixed = {name: size for name, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
    if absorbing:
        if total % product:
            raise MeshError(
                f"{group}: {factors}: the fixed sizes multiply to {product}, which does not divide {total} {what}"
            )
        return {name: total // product if size == -1 else size for name, size in sizes.items()}
    if product != total:
        raise MeshError(
            f"{group}: {factors} = {product}, but there are {total} {what}",
            suggestion="set one of them to -1 to absorb what is left",
        )
    return dict(sizes)
