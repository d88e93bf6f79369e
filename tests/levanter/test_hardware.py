"""The accelerator table against published shapes, sizes and arithmetic."""

import pytest

from levanter.hardware import (
    GENERATIONS,
    AcceleratorError,
    default_topologies,
    find_accelerator,
    find_generation,
    parse_accelerator,
)
from levanter.hardware.memory import FRACTION_VARIABLES, GpuMemoryError, memory_fraction

pytestmark = pytest.mark.quick

# (name, topology string, chips, hosts, wrap-around), from Google's Cloud TPU configuration tables.
PUBLISHED = [
    ("v4-8", "v4:2x2x1", 4, 1, (False, False, False)),
    ("v4-16", "v4:2x2x2", 8, 2, (False, False, False)),
    ("v4-32", "v4:2x2x4", 16, 4, (False, False, False)),
    ("v4-64", "v4:2x4x4", 32, 8, (False, False, False)),
    ("v4-128", "v4:4x4x4", 64, 16, (True, True, True)),
    ("v4-256", "v4:4x4x8", 128, 32, (True, True, True)),
    ("v4-384", "v4:4x4x12", 192, 48, (True, True, True)),
    ("v4-512", "v4:4x8x8", 256, 64, (True, True, True)),
    ("v4-1024", "v4:8x8x8", 512, 128, (True, True, True)),
    ("v4-2048", "v4:8x8x16", 1024, 256, (True, True, True)),
    ("v4-4096", "v4:8x16x16", 2048, 512, (True, True, True)),
    ("v5p-8", "v5p:2x2x1", 4, 1, (False, False, False)),
    ("v5p-32", "v5p:2x2x4", 16, 4, (False, False, False)),
    ("v5p-128", "v5p:4x4x4", 64, 16, (True, True, True)),
    ("v5p-1024", "v5p:8x8x8", 512, 128, (True, True, True)),
    ("v5p-4096", "v5p:8x16x16", 2048, 512, (True, True, True)),
    ("v5p-12288", "v5p:16x16x24", 6144, 1536, (True, True, True)),
    ("v5litepod-1", "v5e:1x1", 1, 1, (False, False)),
    ("v5litepod-8", "v5e:2x4", 8, 1, (False, False)),
    ("v5litepod-16", "v5e:4x4", 16, 4, (False, False)),
    ("v5e-128", "v5e:8x16", 128, 32, (False, True)),
    ("v6e-1", "v6e:1x1", 1, 1, (False, False)),
    ("v6e-4", "v6e:2x2", 4, 1, (False, False)),
    ("v6e-8", "v6e:2x4", 8, 1, (False, False)),
    ("v6e-64", "v6e:8x8", 64, 16, (False, False)),
    ("v6e-256", "v6e:16x16", 256, 64, (True, True)),
    ("tpu7x-8", "tpu7x:2x2x1", 4, 1, (False, False, False)),
    ("tpu7x-128", "tpu7x:4x4x4", 64, 16, (True, True, True)),
]


@pytest.mark.parametrize(("name", "topology", "chips", "hosts", "wrap"), PUBLISHED)
def test_published_configurations(name, topology, chips, hosts, wrap):
    target = parse_accelerator(name)
    assert (target.topology_name, target.chips, target.hosts, target.wrap) == (topology, chips, hosts, wrap)


def test_host_bounds_and_devices():
    assert parse_accelerator("v6e-8").chips_per_host_bounds == (2, 4, 1)
    assert parse_accelerator("v6e-1").chips_per_host_bounds == (1, 1, 1)
    assert parse_accelerator("v6e-16").chips_per_host_bounds == (2, 2, 1)
    assert parse_accelerator("v4-256").generation.chip_config_name == "megacore"
    ironwood = parse_accelerator("tpu7x-16")
    assert (ironwood.chips, ironwood.devices) == (8, 16)
    assert 2 * ironwood.peak_flops() == pytest.approx(2307e12)


def test_multislice():
    target = parse_accelerator("2xv5p-128")
    assert (target.name, target.slices, target.chips, target.hosts) == ("2xv5p-128", 2, 128, 32)
    assert target.topology_name == "v5p:4x4x4"
    assert target.libtpu_accelerator_type == "v5p-128"
    # 200 Gb/s a host of four chips.
    assert target.dcn_device_bandwidth == pytest.approx(6.25e9)


def test_explicit_topologies_keep_their_shape():
    assert parse_accelerator("v4:4x4x8").name == "v4-256"
    odd = parse_accelerator("v4:4x8x4")
    assert (odd.name, odd.topology) == ("v4:4x8x4", (4, 8, 4))
    assert parse_accelerator("v6e:1x1") == parse_accelerator("v6e-1")


def test_names_round_trip_through_their_canonical_form():
    for generation in GENERATIONS:
        for chips in default_topologies(generation):
            name = f"{generation.name}-{chips * generation.cores_per_chip}"
            target = parse_accelerator(name)
            assert target.name == name
            assert target.chips == chips


def test_gpus_by_hosts_and_nvlink_domains():
    two_hosts = parse_accelerator("h100x16")
    assert (two_hosts.chips, two_hosts.hosts, two_hosts.slices, two_hosts.can_compile) == (16, 2, 2, True)
    assert two_hosts.topology_name == "2x1x8" and parse_accelerator("h100x4").topology_name == "1x1x4"
    assert parse_accelerator("h100x4").hosts == 1
    assert parse_accelerator("a100x8").peak_flops("f32") == pytest.approx(19.5e12)
    # A domain of GB200 spans eighteen hosts of four; a part of it is one domain, more are whole ones.
    racks, part = parse_accelerator("gb200x144"), parse_accelerator("GB200x16")
    assert (racks.slices, racks.hosts, racks.topology_name) == (2, 36, "2x18x4")
    assert (part.slices, part.hosts, part.topology_name) == (1, 4, "1x4x4")


def test_cards_whose_names_have_a_hyphen():
    for name, memory in (("a100-40x8", 42331013120), ("h100-pcieX2", 84942979072), ("rtx6000prox4", 103079215104)):
        target = parse_accelerator(name)
        assert target.name == name.lower() and target.generation.hbm_bytes == memory
    generations = {
        kind: find_generation(kind) for kind in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL")
    }
    assert [generation and generation.name for generation in generations.values()] == ["h100-pcie", "a100", "h100"]


@pytest.mark.parametrize(("name", "text", "share"), [(None, "", 0.75), *((v, "0.9", 0.9) for v in FRACTION_VARIABLES)])
def test_of_a_gpu_the_allocator_takes_a_share(monkeypatch, name, text, share):
    for variable in FRACTION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, text)
    assert parse_accelerator("h100x8").hbm_bytes == int(84942979072 * share)


def test_a_share_that_the_driver_needs_itself_is_not_promised(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
    assert parse_accelerator("l4x1").hbm_bytes == (23034 << 20) - (1 << 30)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"XLA_CLIENT_MEM_FRACTION": "most"}, "XLA_CLIENT_MEM_FRACTION=most: expected a share"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "-1"}, "above 0 and at most 1"),
        (dict.fromkeys(FRACTION_VARIABLES, "0.5"), "are both set"),
    ],
)
def test_a_share_that_jax_would_refuse(variables, message):
    with pytest.raises(GpuMemoryError, match=message):
        memory_fraction(variables)


def test_peaks_follow_from_matrix_units_and_clock():
    """Peak = chips' 128 × 128 matrix units × 2 FLOP × clock, within rounding of the published figure."""
    for name, units in (("v4-8", 8), ("v5p-8", 8), ("v5litepod-4", 4)):
        generation = parse_accelerator(name).generation
        assert generation.clock_hz is not None
        assert generation.peak_bf16 == pytest.approx(units * 128 * 128 * 2 * generation.clock_hz, rel=0.003)


def test_f32_costs_six_passes():
    target = parse_accelerator("v4-256")
    assert target.peak_flops("f32") == pytest.approx(275e12 / 6)
    assert target.peak_flops("high") == pytest.approx(275e12 / 3)


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("v4-100", ["'v4-100'", "2 cores a chip", "v4-64 or v4-128"]),
        ("v4-7", ["nearest: v4-8"]),
        ("v6e-100", ["counts chips", "v6e-64 or v6e-128"]),
        ("v5p-2x2", ["write v5p:2x2"]),
        ("v6e-512", ["v6e-128 or v6e-256"]),
        ("v9-8", ["unknown accelerator 'v9-8'", "did you mean", "Known families: v4, v5litepod, v5e, v5p"]),
        ("v6-256", ["v6e-256"]),
        ("tpu", ["unknown accelerator"]),
        ("0xv4-8", ["0 slices"]),
        ("257xv4-8", ["257 slices", "at most 256"]),
        ("10000xv5p-128", ["10,000 slices"]),
        ("v6e:3x3", ["must be even", "v6e:2x4"]),
        ("v6e:32x32", ["larger than the largest v6e slice"]),
        ("v6e:4x4x4", ["2 dimensions, this one has 3"]),
        ("h100x12", ["hosts of 8", "h100x8 or h100x16"]),
        ("h100:8", ["specified by their count alone"]),
        ("gb200x6", ["hosts of 4", "gb200x4 or gb200x8"]),
        ("gb200x100", ["NVLink domains of 72", "gb200x72 or gb200x144"]),
        ("h100-sxmx8", ["unknown accelerator"]),
        ("v4x8", ["write v4-8"]),
    ],
)
def test_bad_names_say_what_is_near(name, fragments):
    with pytest.raises(AcceleratorError) as caught:
        parse_accelerator(name)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_devices_are_known_by_kind_and_number():
    """Every size that is made is found again; nothing is made of another number, of GPUs or of CPUs."""
    for generation in GENERATIONS:
        assert find_generation(generation.device_kind) == generation
        for chips in default_topologies(generation):
            pod = parse_accelerator(f"{generation.name}-{chips * generation.cores_per_chip}")
            assert find_accelerator(generation.device_kind, pod.devices) == pod
    assert find_accelerator("TPU v6 lite", 16, slices=2) == parse_accelerator("2xv6e-8")
    for kind, devices, slices in (("TPU v6 lite", 12, 1), ("TPU v6 lite", 9, 2), ("cpu", 8, 1)):
        assert find_accelerator(kind, devices, slices=slices) is None
    h100 = find_generation("NVIDIA H100 80GB HBM3")
    assert h100 is not None and h100.name == "h100" and find_accelerator("NVIDIA H100 80GB HBM3", 8) is None
