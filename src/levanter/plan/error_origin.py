"""Whose error a `ValueError` is: said by our rooms to a user about the input, or a bug of ours that a library met."""

LIBRARIES = ("jax", "jaxlib", "haliax", "equinox", "optax", "numpy")


def raised_in_library(error: BaseException) -> bool:
    """Whether `error` comes out of a library under us: no input explains it, and its traceback is what counts."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    module = at.tb_frame.f_globals.get("__name__", "") if at is not None else ""
    return module.split(".")[0] in LIBRARIES
