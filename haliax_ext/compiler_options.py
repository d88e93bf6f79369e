"""The error of a Program whose compiler options the compiler refuses.

XLA checks the options of a compilation itself and reports a refusal as an internal error. Options come from a
configuration, so a refused one is bad input: `translate_option_errors` raises a `CompilerOptionError` instead.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import contextlib
import re
from collections.abc import Generator, Mapping

# XLA does not know an option, or cannot read its value.
_OPTION_ERROR = re.compile(r"No such compile option|While setting option|Failed to parse .* into flag")


class CompilerOptionError(ValueError):
    """A compiler refuses an option of a Program; its own message is part of the error's."""

    def __init__(self, program: str, options: Mapping[str, str], compiler_message: str):
        self.options = dict(options)
        self.compiler_message = compiler_message
        listed = ", ".join(f"{name}={value}" for name, value in options.items())
        super().__init__(
            f"program {program}: the compiler does not take its options: {compiler_message}\n  options: {listed}"
        )


@contextlib.contextmanager
def translate_option_errors(program: str, options: Mapping[str, str]) -> Generator[None]:
    """Raises a `CompilerOptionError` where a compiler refuses options inside the block.

    Args:
        program: what is compiled.
        options: those that it is compiled with.

    Raises:
        CompilerOptionError: the compiler does not know one of them, or cannot read its value.
    """
    try:
        yield
    except RuntimeError as error:
        # jax.errors.JaxRuntimeError is a RuntimeError; no other one has these texts.
        first_line = str(error).partition("\n")[0]
        if not options or not _OPTION_ERROR.search(first_line):
            raise
        raise CompilerOptionError(program, options, first_line) from error
