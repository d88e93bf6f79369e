"""Compiler options tried before anything is loaded: a compiler that refuses one says so now, not after the weights."""

import jax.numpy as jnp
from jax.sharding import Mesh

from haliax_ext.compiler_options import CompilerOptionError
from haliax_ext.program import Program
from levanter.runplan import RunPlan
from levanter.trainer.config import TrainerConfig

PROGRAM = "compiler_options"
"""The Program that is compiled for nothing but its options; it never runs."""


def try_compiler_options(trainer: TrainerConfig, plan: RunPlan, mesh: Mesh) -> None:
    """Compiles a Program of one number with the options of each Program of a run, tuned or written.

    Args:
        trainer: what the user chose.
        plan: of the run.
        mesh: its devices.

    Raises:
        CompilerOptionError: the compiler does not know an option, or cannot read its value.
    """
    if trainer.compiler == "default" and not trainer.compiler_options:
        return
    for options in {tuple(program.compiler_options.items()) for program in plan.computing}:
        if options:
            nothing = Program(
                name=PROGRAM, function=lambda: {"zero": jnp.zeros(())}, inputs=(), compiler_options=dict(options)
            )
            try:
                nothing.prepare(mesh)
            except CompilerOptionError as error:
                if trainer.compiler == "default" or any(name in error.said for name in trainer.compiler_options):
                    raise
                remedy = "trainer.compiler: default leaves out the tuned ones"
                raise CompilerOptionError(PROGRAM, options=dict(options), said=f"{error.said} ({remedy})") from error
