"""Families by name: this project's, those of packages in `tests/fixtures`, and packages with something wrong."""

import importlib
import subprocess
import sys
from dataclasses import dataclass, field

import haliax as hax
import jax
import pytest
from helpers.heron import CONFIG, FIXTURES, shapes, with_packages

from levanter.compat.hf.config_bridge import _leaf_tensors, expected_tensors, family_for, read_config, write_config
from levanter.compat.hf.errors import CheckpointError, UnknownModelError
from levanter.config import ConfigError, parse_text
from levanter.config.help import explain
from levanter.models import registry
from levanter.models.llama.config import LlamaConfig
from levanter.models.registry import (
    BUILTIN,
    FamilyError,
    LmConfig,
    families_of_config_json,
    family_for_config,
    family_named,
    family_names,
    family_of_config_json,
)


@dataclass(frozen=True, kw_only=True)
class _Holder:
    """What has a `model:` block.

    Attributes:
        model: any family's.
    """

    model: LmConfig = field(default_factory=LlamaConfig)


def installed(monkeypatch, *folders) -> None:
    """Puts packages on Python's path for a test; what they registered is forgotten afterwards."""
    monkeypatch.setattr(LmConfig, "_choice_registry", dict(LmConfig.get_known_choices()))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for folder in folders:
        monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    registry._loaded.cache_clear()


@pytest.fixture
def packages(monkeypatch):
    installed(monkeypatch, FIXTURES / "heron", FIXTURES / "egret")


def distribution(folder, name: str, points: str, **modules: str):
    """A package written for a test."""
    info = folder / f"{name}-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(f"[levanter.families]\n{points}\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


@pytest.mark.parametrize("name", BUILTIN)
def test_ours_are_where_the_table_says(name):
    family = family_named(name)
    assert family.name == name and family_for_config(family.config_class) is family
    assert LmConfig.get_choice_class(name) is family.config_class
    assert LmConfig.get_choice_name(family.config_class) == name
    known = families_of_config_json(family.config_json[0].model_type)
    assert all(known[kind.model_type] == (family, kind) for kind in family.config_json)
    assert all(family_of_config_json(kind.model_type) == (family, kind) for kind in family.config_json)


def test_a_config_json_imports_its_own_family_only():
    script = """
import sys
from levanter.models.registry import family_of_config_json
family, kind = family_of_config_json("gemma3_text")
print(family.name, kind.model_type, *sorted(name for name in sys.modules if name.endswith(".family")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gemma3", "gemma3_text", "levanter.models.family", "levanter.models.gemma.family"]
    assert family_of_config_json("lama") is None


def test_a_class_derived_from_a_familys_config_is_not_of_that_family():
    """Its arithmetic may be another: it is refused wherever its family would decide, with what to do."""

    class Derived(LlamaConfig):
        pass

    config = Derived(hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=8)
    refused = (
        r"Derived has no model family: it is not registered, and .* inherit the family of its parent "
        r"\(LlamaConfig, 'llama'\)\. To register one, .*'levanter\.families'.*config_class=Derived .*families: .*llama"
    )
    for ask in (
        lambda: family_for_config(Derived),
        lambda: family_for(config),
        lambda: config.build(hax.Axis("vocab", 8), key=jax.random.PRNGKey(0)),
        config.weight_rules,
        lambda: config.flops(vocab_size=8, context_length=4, attention="full"),
    ):
        with pytest.raises(ValueError, match=refused):
            ask()


def test_a_config_without_a_family_is_told_so():
    class Alone(LmConfig):
        pass

    with pytest.raises(
        ValueError, match=r"Alone has no model family: it is not registered, and .*class\. To register one.*llama"
    ):
        family_for_config(Alone)


def test_packages_are_named_and_not_imported(packages):
    assert {"heron", "egret"} <= set(family_names()) and "heron" not in LmConfig.get_known_choices()
    assert {"egret", "heron"} <= set(LmConfig.choice_names())
    assert "egret | " in explain(_Holder) and " | heron | " in explain(_Holder)
    assert not {"heron", "egret"} & set(sys.modules)
    with pytest.raises(ValueError, match=r"'hern' is not a model family \(.*heron.*\); did you mean heron"):
        LmConfig.get_choice_class("hern")
    assert not {"heron", "egret"} & set(sys.modules)


def test_a_packages_family_is_found_by_its_name(packages):
    config = parse_text(_Holder, "model: {type: heron, calm: 0.25}").model
    assert type(config).__name__ == "HeronConfig" and config.calm == 0.25
    assert LmConfig.get_choice_name(type(config)) == "heron"
    assert "--model.calm" in explain(_Holder, chosen={"model": "heron"})
    with pytest.raises(ConfigError, match=r"model\.type: unknown type `hern`.*did you mean `heron`"):
        parse_text(_Holder, "model: {type: hern}")


def test_a_packages_family_is_found_by_its_model_type(packages):
    bridged = read_config(CONFIG)
    assert bridged.family.name == "heron" and bridged.findings == ()
    written = write_config(bridged.config, dtype="float32", spelling="transformers4")
    assert written == CONFIG
    found = {name: each.shape for each in expected_tensors(bridged.config) for name in each.names}
    assert {name: found[name] for name in shapes()} == shapes()
    # A model that is no decoder says the same of itself, leaf by leaf.
    alone = {name: each.shape for each in _leaf_tensors(bridged.config) for name in each.names}
    assert {name: alone[name] for name in shapes()} == shapes()
    flops = bridged.config.flops(vocab_size=300, context_length=48, attention="full")
    matrices = sum(shape[0] * shape[1] for name, shape in shapes().items() if len(shape) == 2 and "words" not in name)
    assert flops.weights == 2 * matrices and flops.attention == 4 * 4 * 32 * 48
    with pytest.raises(CheckpointError, match="field 'wing' is missing"):
        read_config({name: value for name, value in CONFIG.items() if name != "wing"})


BROKEN = (
    "model family 'egret' comes from the package egret-models 0.1 (egret.family:EGRET), which cannot be imported: "
    "ModuleNotFoundError: No module named 'egret.feathers'"
)


def test_a_broken_package_is_an_error_only_to_who_asks_for_it(packages):
    with pytest.raises(FamilyError) as caught:
        family_named("egret")
    assert str(caught.value) == BROKEN
    with pytest.raises(ConfigError) as refused:
        parse_text(_Holder, "model: {type: egret}")
    assert f"model.type: {BROKEN}" in str(refused.value)
    assert type(parse_text(_Holder, "model: {type: llama}").model) is LlamaConfig
    assert type(parse_text(_Holder, "model: {type: heron}").model).__name__ == "HeronConfig"


def test_an_unknown_model_type_says_which_packages_could_not_be_asked(packages):
    with pytest.raises(UnknownModelError) as caught:
        read_config({"model_type": "egret_lm"})
    assert "known model types: gemma, " in str(caught.value) and ", heron_lm, " in str(caught.value)
    assert BROKEN in str(caught.value)


WRONG = {
    "another name": (
        "ibis = ibis_family:HERON",
        "from heron.family import HERON",
        r"'ibis' comes from the package ibis 0\.0\.1 .*, whose own name is 'heron'; they must be the same",
    ),
    "no family": ("ibis = ibis_family:HERON", "HERON = 3", r"package ibis 0\.0\.1 .*, which is a int; expected"),
    "no such name": ("ibis = ibis_family:IBIS", "", r"package ibis 0\.0\.1 .* cannot be imported: AttributeError"),
    "a class that has the name": (
        "ibis = ibis_family:IBIS",
        "import dataclasses\n"
        "from heron.family import HERON\n"
        "from levanter.models.registry import LmConfig\n"
        "LmConfig.register_subclass('ibis', type(HERON.config_class))\n"
        "IBIS = dataclasses.replace(HERON, name='ibis')",
        r"package ibis 0\.0\.1 .*already registered as ibis",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_family_is_refused(case, monkeypatch, tmp_path):
    points, text, message = WRONG[case]
    installed(monkeypatch, FIXTURES / "heron", distribution(tmp_path / "a", "ibis", points, ibis_family=text))
    with pytest.raises(FamilyError, match=message):
        family_named("ibis")


def test_two_packages_with_one_name_are_refused_by_both_names(monkeypatch, tmp_path):
    other = distribution(tmp_path, "other-herons", "heron = heron.family:HERON\nllama = heron.family:HERON")
    installed(monkeypatch, FIXTURES / "heron", other)
    message = r"'heron' comes from 2 packages: .*heron-models 1\.2 .*; uninstall all but one"
    with pytest.raises(FamilyError, match=message):
        family_named("heron")
    # Our own names cannot be taken.
    assert family_named("llama").config_class is LlamaConfig and family_names().count("llama") == 1


def test_importing_the_models_imports_no_package_and_no_rest_of_a_family():
    code = (
        "import sys, levanter.models\n"
        "assert levanter.models.LmConfig.choice_names()\n"
        "families = {place.partition(':')[0] for place in levanter.models.registry.BUILTIN.values()}\n"
        "print(sorted({'heron', 'egret', *families} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=with_packages("heron", "egret"), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
