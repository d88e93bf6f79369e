"""Mesh axis sizes by pure arithmetic: `-1` absorbs what is left, products must equal the devices there are."""

import math
from collections.abc import Mapping

from haliax_ext.divisibility import nearest_divisors
from haliax_ext.errors import MeshError, ShardingError, raise_all
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.config import DEFAULT_AXES, DEFAULT_DCN_AXES, MeshConfig


def resolve_sizes(config: MeshConfig, *, devices: int, granules: int = 1) -> MeshSpec:
    """The mesh of `config` on `devices` devices that form `granules` granules (slices, or processes).

    The order of the axes is ICI first, DCN last, defaults before the user's own.

    Raises:
        MeshError: an axis in both groups, two absorbing axes, or products that do not match; every factor is listed.

    >>> print(resolve_sizes(MeshConfig(axes={"data": -1, "model": 4}), devices=16))
    data 4 × replica 1 × model 4 × replica_dcn 1 (DCN)
    """
    if devices < 1 or granules < 1 or devices % granules:
        raise MeshError(f"{devices} devices do not form {_count(granules, config.granule)} of equal size")
    # Merged over the defaults, so that a user who names one mesh axis keeps the others.
    axes = _merged(DEFAULT_AXES, config.axes)
    dcn_axes = _merged(DEFAULT_DCN_AXES, config.dcn_axes)
    problems: list[ShardingError] = []
    if duplicates := sorted(axes.keys() & dcn_axes.keys()):
        first = duplicates[0]
        problems.append(
            MeshError(
                f"trainer.mesh: mesh axis {', '.join(duplicates)} is in both axes (inside a {config.granule}) and "
                f"dcn_axes (across {_plural(config.granule)})",
                suggestion=f"give one of them another name, e.g. dcn_axes: {{{first}_dcn: -1}}, "
                f"and map logical axes to [{first}_dcn, {first}]",
            )
        )
    resolved: dict[str, int] = {}
    one_slice = None
    # Users of several hosts often expect a DCN axis here; within a slice there is none, and the hint says what there
    # is.
    if granules == 1 and config.granule == "slice":
        one_slice = (
            "a slice may hold many hosts, and these devices form one; for a mesh axis across its hosts, name one in "
            "axes, e.g. axes: {data: 4, host: -1}"
        )
    # Both groups are resolved even if the first fails, so that all problems are reported at once.
    for group, sizes, total, units, hint in (
        ("axes", axes, devices // granules, f"{_count(devices // granules, 'device')} in one {config.granule}", None),
        ("dcn_axes", dcn_axes, granules, _count(granules, config.granule), one_slice),
    ):
        try:
            resolved |= _absorb(sizes, total, group=f"trainer.mesh.{group}", what=units, hint=hint)
        except MeshError as error:
            problems.append(error)
    raise_all(problems)
    return MeshSpec(axes=tuple(resolved.items()), dcn=tuple(dcn_axes), granule=config.granule)


def _plural(word: str) -> str:
    return word + ("es" if word.endswith("s") else "s")


def _count(n: int, word: str) -> str:
    return f"{n} {word if n == 1 else _plural(word)}"


def _merged(defaults: Mapping[str, int], configured: Mapping[str, int]) -> dict[str, int]:
    merged = {**defaults, **configured}
    # A default absorber steps back when the user named another one and did not mention it.
    if any(size == -1 for size in configured.values()):
        for name, size in defaults.items():
            if size == -1 and name not in configured:
                merged[name] = 1
    return merged


def _absorb(sizes: Mapping[str, int], total: int, *, group: str, what: str, hint: str | None) -> dict[str, int]:
    absorbing = [name for name, size in sizes.items() if size == -1]
    if len(absorbing) > 1:
        raise MeshError(f"{group}: only one mesh axis may be -1, got {', '.join(absorbing)}")
    fixed = {name: size for name, size in sizes.items() if size != -1}
    product = math.prod(fixed.values())
    factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
    if absorbing:
        # `total / product` would not be whole: no size of the absorbing axis uses every device.
        if total % product:
            near = " or ".join(map(str, nearest_divisors(total, product)))
            raise MeshError(
                f"{group}: {factors}: the fixed sizes multiply to {product}, which does not divide {what}",
                suggestion=hint or f"nearest products that divide {total}: {near}",
            )
        return {name: total // product if size == -1 else size for name, size in sizes.items()}
    if product != total:
        raise MeshError(
            f"{group}: {factors} = {product}, but there {'is' if total == 1 else 'are'} {what}",
            suggestion=hint or "set one of them to -1 to absorb the remaining devices",
        )
    return dict(sizes)
