"""What is said where a compiler does not take an option that a Program gives it.

XLA judges the options of a compilation itself, in words of its own and as an internal error. They come from a
configuration, so they are bad input: `translate_option_errors` makes a `CompilerOptionError` of what the compiler says.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import contextlib
import re
from collections.abc import Generator, Mapping

# XLA knows no option of a name; or cannot read an option's value.
_OPTION_ERROR = re.compile(r"No such compile option|While setting option|Failed to parse .* into flag")


class CompilerOptionError(ValueError):
    """A compiler does not take an option of a Program; its own words are in the message."""

    def __init__(self, program: str, options: Mapping[str, str], compiler_message: str):
        self.options = dict(options)
        self.compiler_message = compiler_message
        listed = ", ".join(f"{name}={value}" for name, value in options.items())
        super().__init__(
            f"program {program}: the compiler does not take its options: {compiler_message}\n  options: {listed}"
        )


@contextlib.contextmanager
def translate_option_errors(program: str, options: Mapping[str, str]) -> Generator[None]:
    """Makes a `CompilerOptionError` of what a compiler says of options inside.

    Args:
        program: what is compiled.
        options: those that it is compiled with.

    Raises:
        CompilerOptionError: the compiler does not know one of them, or cannot read its value.
    """
    try:
        yield
    except RuntimeError as error:
        # jax.errors.JaxRuntimeError is one, and nothing else that says such a thing.
        first_line = str(error).partition("\n")[0]
        if not options or not _OPTION_ERROR.search(first_line):
            raise
        raise CompilerOptionError(program, options, first_line) from error
