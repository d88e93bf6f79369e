"""Parses the names of accelerators into chips, hosts and topology."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, lru_cache

from levanter.hardware.generations import BF16_PASSES, GENERATIONS, Generation, Precision
from levanter.hardware.memory import allocator_bytes, memory_fraction

MOST_SLICES = 256
"""The most slices of one target. The largest published job has 199 (of 256 chips of v5e)."""


def unit_name(platform: str) -> str:
    """What one accelerator of a platform is called in reports and messages."""
    return {"tpu": "chip", "gpu": "GPU"}.get(platform, "device")


class AcceleratorError(ValueError):
    """An unknown name of an accelerator, or a size that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Some number of equal slices (of GPUs: NVLink domains, which are hosts unless a domain spans several).

    Attributes:
        name: canonical name.
        generation: the properties of each chip.
        topology: chips along each torus axis of one slice; `(chips,)` for GPUs.
        slices: their number; the data-center network joins them.
    """

    name: str
    generation: Generation
    topology: tuple[int, ...]
    slices: int = 1

    @cached_property
    def chips_per_slice(self) -> int:
        """Chips of one slice: the product of the topology."""
        return math.prod(self.topology)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.chips_per_slice * self.slices

    @property
    def devices(self) -> int:
        """Devices of all slices: the size of the mesh."""
        return self.chips * self.generation.devices_per_chip

    @cached_property
    def chips_per_host(self) -> int:
        """A single host holds 1, 4 or 8 chips of a 2D generation; a slice of many hosts has 4 on each."""
        if self.generation.topology_axes == 2 and self.chips_per_slice <= 8:
            return self.chips_per_slice
        return min(self.generation.chips_per_host, self.chips_per_slice)

    @property
    def unit(self) -> str:
        """The word for what has a memory of its own: `chip`, `GPU`, or `device` where a chip has several."""
        return unit_name(self.generation.platform) if self.devices == self.chips else "device"

    @property
    def hosts(self) -> int:
        """Hosts of all slices."""
        return self.chips // self.chips_per_host

    @cached_property
    def chips_per_host_bounds(self) -> tuple[int, int, int] | None:
        """The block of chips that one host holds, in the form that libtpu takes; `None` for GPUs."""
        if self.generation.platform == "gpu":
            return None
        return {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[self.chips_per_host]

    @property
    def topology_name(self) -> str:
        """The string by which the compiler names it: one slice of TPUs, such as `v4:4x4x8`, or all GPUs as slices ×
        hosts of a slice × GPUs of a host, such as `8x1x8`."""
        if self.generation.platform == "gpu":
            return f"{self.slices}x{self.chips_per_slice // self.chips_per_host}x{self.chips_per_host}"
        return f"{self.generation.compiler_name}:{'x'.join(map(str, self.topology))}"

    @cached_property
    def wrap(self) -> tuple[bool, ...]:
        """Whether each topology axis closes to a ring."""
        if self.generation.topology_axes == 3:
            # Optical switches close the axes of a slice of whole 4 × 4 × 4 cubes; smaller slices do not wrap.
            torus = all(side % 4 == 0 for side in self.topology)
            return (torus,) * 3
        if self.generation.topology_axes == 2:
            # Only an axis of the whole pod (16 chips) has wraparound links.
            return tuple(side == 16 for side in self.topology)
        return (False,)

    @property
    def can_compile(self) -> bool:
        """Whether the target's compiler can compile for it without an accelerator."""
        return self.generation.platform == "tpu" or self.generation.gpu is not None

    @property
    def hbm_bytes(self) -> int:
        """Usable bytes of one device; of a GPU those that JAX's allocator takes, as this environment sets its share.

        Raises:
            GpuMemoryError: the environment names no share.
        """
        if self.generation.platform == "gpu":
            return allocator_bytes(self.generation.hbm_bytes, fraction=memory_fraction())
        return self.generation.hbm_bytes

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s of one device."""
        return self.generation.hbm_bandwidth / self.generation.devices_per_chip

    def peak_flops(self, precision: Precision = "bf16") -> float:
        """Peak matmul FLOP/s of one device; `f32` is true f32 (six bf16 passes on a TPU)."""
        native = self.generation.peak_f32_native
        if precision == "f32" and native is not None:
            return native
        # The table has figures of a chip; a device of tpu7x is half of one.
        return self.generation.peak_bf16 / BF16_PASSES[precision] / self.generation.devices_per_chip

    @property
    def dcn_device_bandwidth(self) -> float | None:
        """Bytes/s in each direction between slices for one device; `None`: not published."""
        host = self.generation.dcn_host_bandwidth
        if host is None:
            return None
        # NIC speeds are stated for the generation's full host; smaller hosts have their share of it.
        return host / self.generation.chips_per_host / self.generation.devices_per_chip

    @property
    def network_names(self) -> Mapping[str, str]:
        """The names of what joins chips, by `ici` (inside a slice) and `dcn` (between slices)."""
        gpu = self.generation.gpu
        if gpu is None:
            return {"ici": "ICI", "dcn": "DCN"}
        return {"ici": "NVLink" if gpu.nvlinks else "PCIe", "dcn": "network"}

    @property
    def libtpu_accelerator_type(self) -> str:
        """The name of one slice in libtpu's environment variables."""
        return _canonical_name(self.generation, self.topology, 1)

    def __str__(self) -> str:
        shape = "×".join(map(str, self.topology))
        gpu, hosts = self.generation.gpu, "host" if self.hosts == 1 else "hosts"
        slices = "slices" if gpu is None else "NVLink domains" if gpu.nvlinks else "hosts"
        what = f"{self.slices} {slices} of {shape}" if self.slices > 1 else shape
        chips = f"{self.chips} {unit_name(self.generation.platform)}{'' if self.chips == 1 else 's'}"
        if gpu is not None and self.slices == 1:
            return f"{self.name} ({chips}, {self.hosts} {hosts})"
        return f"{self.name} ({what}: {chips}, {self.hosts} {hosts})"


_NAME = re.compile(r"(?:(?P<slices>\d+)x)?(?P<family>[a-z]\w*?)(?P<sep>[-:x])(?P<size>\d+(?:x\d+)*)")
# The names of some cards have a hyphen, which separates a number of chips elsewhere: `a100-40x8`.
_CARD = re.compile(r"(?P<family>[a-z0-9]+-(?:40|pcie))(?P<sep>x)(?P<size>\d+)")


def parse_accelerator(name: str) -> Accelerator:
    """Reads `v4-256`, `v5litepod-16`, `v5e-16`, `v6e-256`, `tpu7x-16`, `2xv5p-128`, `v6e:4x8` or `h100x8`.

    Raises:
        AcceleratorError: an unknown family (with the nearest ones), or a size that is not made (with the nearest).
    """
    text = name.strip().lower()
    generation = None
    if match := _CARD.fullmatch(text):
        card = _generation(match["family"])
        if card is not None:
            return _gpus(name, card, (int(match["size"]),), 1, match["sep"])
    # The family is matched lazily: in `h100x8` it ends before the separator,
    # and `2x` before a family counts slices.
    if match := _NAME.fullmatch(text):
        generation = _generation(match["family"])
    if match is None or generation is None:
        close = get_close_matches(text, _all_names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        families = ", ".join(alias for g in GENERATIONS for alias in (g.name, *g.aliases))
        raise AcceleratorError(
            f"unknown accelerator {name!r}{hint} Known families: {families}; "
            "examples: v4-256, v5p-512, v6e-64, 2xv5p-128, v6e:4x8, h100x8"
        )
    slices = int(match["slices"] or 1)
    if slices < 1:
        raise AcceleratorError(f"{name!r}: {slices} slices; there must be at least one")
    if slices > MOST_SLICES:
        raise AcceleratorError(f"{name!r}: {slices:,} slices; there can be at most {MOST_SLICES}")
    sizes = tuple(int(part) for part in match["size"].split("x"))
    if generation.platform == "gpu":
        return _gpus(name, generation, sizes, slices, match["sep"])
    if match["sep"] == "x":
        raise AcceleratorError(f"{name!r}: write {generation.name}-{match['size']}")
    topology = _explicit(name, generation, sizes) if match["sep"] == ":" else _sized(name, generation, sizes)
    return Accelerator(
        name=_canonical_name(generation, topology, slices), generation=generation, topology=topology, slices=slices
    )


def find_generation(kind: str) -> Generation | None:
    """The generation of a device, by the vendor's name for it; None where it is not known.

    GPUs of one generation have several names with a common beginning.
    """

    def shares_brand(generation: Generation) -> bool:
        # `NVIDIA H200 141GB HBM3e` and `NVIDIA H200` share their first two words.
        brand = " ".join(generation.device_kind.split()[:2])
        return generation.platform == "gpu" and kind.startswith(brand)

    # The whole name first: `NVIDIA H100 PCIe` begins like `NVIDIA H100 80GB HBM3`, which is another card.
    exact = next((generation for generation in GENERATIONS if kind == generation.device_kind), None)
    return exact or next((generation for generation in GENERATIONS if shares_brand(generation)), None)


def find_accelerator(kind: str, devices: int, *, slices: int = 1) -> Accelerator | None:
    """The accelerator with a number of TPU devices of a kind, in slices of the default topology of their size.

    Args:
        kind: the vendor's name of a device.
        devices: their number, over all slices.
        slices: the number of slices.

    Returns:
        None where the kind is not known, or has no slices of that size.
    """
    generation = find_generation(kind)
    if generation is None or generation.platform != "tpu" or devices % (slices * generation.devices_per_chip):
        return None
    # Names count cores where a chip has two, so devices go through chips to the number in the name.
    cores = devices // slices // generation.devices_per_chip * generation.cores_per_chip
    try:
        return parse_accelerator(f"{slices}x{generation.name}-{cores}" if slices > 1 else f"{generation.name}-{cores}")
    except AcceleratorError:
        return None


def _generation(family: str) -> Generation | None:
    return next((g for g in GENERATIONS if family in (g.name, *g.aliases)), None)


def _canonical_name(generation: Generation, topology: tuple[int, ...], slices: int) -> str:
    prefix = f"{slices}x" if slices > 1 else ""
    chips = math.prod(topology)
    # A shape that is not the default of its size must be spelled out, or the name would mean another torus.
    if topology == default_topologies(generation).get(chips):
        return f"{prefix}{generation.name}-{chips * generation.cores_per_chip}"
    return f"{prefix}{generation.compiler_name}:{'x'.join(map(str, topology))}"


def _gpus(name: str, generation: Generation, sizes: tuple[int, ...], slices: int, separator: str) -> Accelerator:
    count = sizes[0]
    if separator == ":" or len(sizes) > 1 or slices > 1:
        raise AcceleratorError(f"{name!r}: GPUs are specified by their count alone, e.g. {generation.name}x{count}")
    host = generation.chips_per_host
    # A part of one host is fine; of several hosts each is full.
    if count < 1 or (count > host and count % host) or count > generation.max_chips:
        lower, upper = max(host, count // host * host), (count // host + 1) * host
        raise AcceleratorError(
            f"{name!r}: {count} GPUs do not fill hosts of {host}; nearest: "
            f"{generation.name}x{lower} or {generation.name}x{upper}"
        )
    # A part of one NVLink domain is fine too; of several domains each is full.
    domain = generation.nvlink_domain
    if count > domain and count % domain:
        lower, upper = count // domain * domain, (count // domain + 1) * domain
        raise AcceleratorError(
            f"{name!r}: {count} GPUs do not fill NVLink domains of {domain}; nearest: "
            f"{generation.name}x{lower} or {generation.name}x{upper}"
        )
    slices = max(1, count // domain)
    return Accelerator(
        name=f"{generation.name}x{count}", generation=generation, topology=(count // slices,), slices=slices
    )


def _sized(name: str, generation: Generation, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) != 1:
        shape = "x".join(map(str, sizes))
        raise AcceleratorError(f"{name!r}: to name a topology write {generation.compiler_name}:{shape}")
    cores, per_chip = sizes[0], generation.cores_per_chip
    known = default_topologies(generation)
    if cores % per_chip == 0 and cores // per_chip in known:
        return known[cores // per_chip]
    chips = cores / per_chip
    nearest = sorted(known, key=lambda c: abs(c - chips))[:2]
    legal = " or ".join(f"{generation.name}-{c * per_chip}" for c in sorted(nearest))
    counts = f"counts {per_chip} cores a chip" if per_chip > 1 else "counts chips"
    raise AcceleratorError(f"{name!r}: {generation.name} ({counts}) does not come in size {cores}; nearest: {legal}")


def _explicit(name: str, generation: Generation, sizes: tuple[int, ...]) -> tuple[int, ...]:
    axes, chips = generation.topology_axes, math.prod(sizes)
    if len(sizes) != axes:
        raise AcceleratorError(
            f"{name!r}: a {generation.name} topology has {axes} dimensions, this one has {len(sizes)}"
        )
    # Both are ascending: a slice can be rotated within the pod.
    fits = all(side <= limit for side, limit in zip(sorted(sizes), generation.pod, strict=True))
    if not fits or chips > generation.max_chips:
        pod = "x".join(map(str, generation.pod))
        raise AcceleratorError(
            f"{name!r}: larger than the largest {generation.name} slice ({pod} and {generation.max_chips} chips)"
        )
    # A host holds a 2 × 2 block in the first two axes; only a single chip of a
    # 2D generation is less than a host.
    whole_host = sizes[0] % 2 == 0 and sizes[1] % 2 == 0
    if chips < 1 or not (whole_host or (axes == 2 and chips == 1)):
        raise AcceleratorError(
            f"{name!r}: hosts hold 2x2 chips, so the first two sides must be even; nearest: "
            + ", ".join(_nearest_topologies(generation, chips))
        )
    return sizes


def _nearest_topologies(generation: Generation, chips: int) -> list[str]:
    known = default_topologies(generation)
    near = sorted(known, key=lambda c: abs(c - chips))[:2]
    return [f"{generation.compiler_name}:{'x'.join(map(str, known[c]))}" for c in sorted(near)]


@lru_cache(maxsize=32)
def default_topologies(generation: Generation) -> dict[int, tuple[int, ...]]:
    """The default topology by number of chips, ascending; from 64 chips on the shape nearest to a cube."""
    if generation.topology_axes == 2:
        return {
            1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16),
        }  # fmt: skip
    if generation.topology_axes == 0:
        return {}
    # Slices below a cube of 64 chips have one shape each.
    shapes: dict[int, tuple[int, ...]] = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    for shape in _cubes(generation):
        chips = math.prod(shape)
        # Least surface for a volume: the shape nearest to a cube, with the shortest ways between chips.
        if chips not in shapes or _surface(shape) < _surface(shapes[chips]):
            shapes[chips] = shape
    return dict(sorted(shapes.items()))


def _cubes(generation: Generation) -> Iterator[tuple[int, ...]]:
    """Every ascending shape whose sides are multiples of 4 and that the pod holds."""
    for shape in itertools.combinations_with_replacement(range(4, generation.pod[-1] + 1, 4), 3):
        fits = all(side <= limit for side, limit in zip(shape, generation.pod, strict=True))
        if fits and math.prod(shape) <= generation.max_chips:
            yield shape


def _surface(shape: tuple[int, ...]) -> int:
    return sum(a * b for a, b in itertools.combinations(shape, 2))


def _all_names() -> list[str]:
    names = [f"{g.name}x8" for g in GENERATIONS if g.platform == "gpu"]
    for generation in GENERATIONS:
        for chips in default_topologies(generation):
            for family in (generation.name, *generation.aliases):
                names.append(f"{family}-{chips * generation.cores_per_chip}")
    return names
