"""Examples in docstrings run, and there are enough of them."""

import doctest
import importlib
import pkgutil

import jax
import pytest

PACKAGES = {"haliax_ext": 50, "levanter.mesh": 24, "levanter.config": 20, "levanter.optim": 36}
"""Package → the least number of its examples (statements behind `>>>`)."""


def modules(package):
    root = importlib.import_module(package)
    names = [package, *(found.name for found in pkgutil.walk_packages(root.__path__, f"{package}."))]
    return [importlib.import_module(name) for name in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_docstrings_are_true(package):
    attempted = 0
    with jax.numpy_dtype_promotion("standard"):
        for module in modules(package):
            result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
            assert result.failed == 0, f"examples of {module.__name__} failed; see the captured output"
            attempted += result.attempted
    assert attempted >= PACKAGES[package]
