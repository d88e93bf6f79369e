"""Compiler options: each platform's own, and none where nothing was measured."""

import pytest

from levanter.hardware import GENERATIONS, compiler_options
from levanter.hardware.compiler import LAYOUTS, as_values, tuned_options

pytestmark = pytest.mark.quick

WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"


def test_v4_multiplies_without_windows():
    assert compiler_options("tpu", "TPU v4") == {WINDOWED: "1000000"}


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_options_are_for_tpus_only(generation):
    options = compiler_options(generation.platform, generation.device_kind)
    assert (WINDOWED in options) == (generation.name == "v4")
    assert compiler_options("cpu", generation.device_kind) == {}
    assert compiler_options("gpu", generation.device_kind) == {}


def test_a_caller_may_add_to_what_it_was_given():
    compiler_options("tpu", "TPU v4")["mine"] = "1"
    assert compiler_options("tpu", "TPU v4") == {WINDOWED: "1000000"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_generating_text_has_half_of_the_vector_memory_where_it_was_compiled_with_it(generation, layout):
    default = compiler_options(generation.platform, generation.device_kind)
    tuned = as_values(tuned_options(generation.platform, generation.device_kind, work="generate", layout=layout))
    own = {"xla_tpu_scoped_vmem_limit_kib": "65536"} if generation.name in ("v5litepod", "v6e") else {}
    assert tuned == {**default, **own}
    assert not tuned_options("cpu", generation.device_kind, work="generate", layout=layout)
