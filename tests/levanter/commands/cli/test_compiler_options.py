"""Compiler options tried before a run loads anything."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from haliax_ext.compiler_options import CompilerOptionError
from levanter.commands.cli.compilation_cache import try_compiler_options
from levanter.runplan import RunPlan
from levanter.trainer.config import TrainerConfig

pytestmark = pytest.mark.quick

REMEDY = "trainer.compiler: default"


def tried(options: dict[str, str], trainer: TrainerConfig) -> str:
    """What is said of a run whose one Program has these options."""
    plan: Any = SimpleNamespace(computing=(SimpleNamespace(compiler_options=options),))
    try:
        try_compiler_options(trainer, cast(RunPlan, plan), jax.make_mesh((1,), ("data",)))
    except CompilerOptionError as error:
        return str(error)
    return ""


def test_a_tuned_option_that_this_compiler_does_not_know_names_the_way_out():
    said = tried({"xla_tpu_of_another_year": "1"}, TrainerConfig())
    assert "No such compile option: 'xla_tpu_of_another_year'" in said and REMEDY in said


def test_an_option_that_was_written_is_the_users():
    written = TrainerConfig(compiler_options={"xla_other": 1})
    said = tried({"xla_other": "1"}, written)
    assert "No such compile option: 'xla_other'" in said and REMEDY not in said


@pytest.mark.parametrize("options", [{}, {"xla_cpu_enable_fast_math": "False"}])
def test_what_the_compiler_knows_is_taken(options):
    assert tried(options, TrainerConfig()) == ""
