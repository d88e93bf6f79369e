"""Packages that import what they offer when it is asked for."""

import subprocess
import sys
from importlib import import_module

import pytest

from haliax_ext.lazy_imports import lazy_names

PACKAGES = (
    "haliax_ext",
    "levanter.data",
    "levanter.memorization",
    "levanter.mesh",
    "levanter.models",
    "levanter.models.decoder",
)


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_offered_is_there(package):
    offers = lazy_names(package)
    assert offers
    for name, module in offers.items():
        assert getattr(import_module(package), name) is getattr(import_module(module), name)


def test_what_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"haliax_ext.*no_such_name"):
        getattr(import_module("haliax_ext"), "no_such_" + "name")


def test_a_submodule_does_not_take_the_name_of_what_is_offered():
    program = "import haliax_ext.abstract; from haliax_ext import abstract; print(type(abstract).__name__)"
    assert run(program) == "function"


def test_other_submodules_are_attributes():
    assert run("import haliax_ext.pytree; print(haliax_ext.pytree.__name__)") == "haliax_ext.pytree"


def test_nothing_is_imported_before_it_is_asked_for():
    program = "import sys, haliax_ext; print('jax' in sys.modules); haliax_ext.Leaf; print('jax' in sys.modules)"
    assert run(program).split() == ["False", "True"]
