"""Every field that `transformers` knows of a family, changed: what changes its numbers changes ours, or is an error.

Names come from `transformers` itself (the config class, what every config may hold, what the modeling code asks for),
so that a field that a new version adds is met here before a checkpoint brings it. Each is changed in a tiny model of
every variant. Where torch then has other tensors, our list of tensors must be torch's; where torch computes other
logits, our config must be another one and, in the slow set, score as torch does; or config.json is refused.

The names are found by regular expressions over the source of the installed `transformers`, which any of its releases
may rewrite. So these tests run by `make test-sources` alone.
"""

import dataclasses
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.family_models import ESSENTIAL, VARIANTS, describe_folder, score, torch_logprobs, transformers_config

from levanter.compat.hf.config_bridge import expected_tensors, read_config
from levanter.compat.hf.errors import CheckpointError
from levanter.models.config_json import HARMLESS, ConfigJsonReader
from levanter.models.registry import families_of_config_json

pytestmark = pytest.mark.sources

OURS = families_of_config_json("llama")

LENGTH, ROWS = 48, 8
OF_THE_LIBRARY = {"num_labels", "problem_type", "is_heterogeneous", "tie_last_hidden_states"}
"""What is asked of any config, and leaves a causal model's logits alone; where a config.json has it, it is reported."""
NOT_TRIED = {"model_type", "transformers_version", "name_or_path", "dtype"}
"""What the other files of this folder are about, or what names things."""


def names_of(config: Any) -> set[str]:
    """Every name that a config.json of this class may hold with a meaning."""
    import transformers

    common = re.findall(r"^        (\w+) \(`", inspect.getsource(transformers.PreTrainedConfig), re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(config)} | set(config.to_dict()) | set(common)
    return {name for name in fields | set(config.attribute_map) if not name.startswith("_")}


def names_asked_for(config: Any) -> set[str]:
    """Names that the causal model's code asks a config for."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    text = inspect.getsource(modeling)
    text = text[: text.find("ForSequenceClassification(")]  # classifiers come last in every file
    found = re.findall(r"\bconfig\.([a-z]\w+)|getattr\(\s*(?:self\.)?config,\s*\"(\w+)\"", text)
    return {one or other for one, other in found}


@pytest.mark.parametrize("model_type", OURS)
def test_every_name_is_read_or_known_to_be_harmless(model_type):
    """Null ones too, which nothing reports."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[model_type]()
    fields = ConfigJsonReader(config.to_dict())
    _, kind = OURS[model_type]
    kind.read(fields)
    assert not fields.problems and not fields.findings
    known = fields.seen | HARMLESS | OF_THE_LIBRARY
    assert names_of(config) - known == set()
    if model_type == "gemma3_text":  # one file of code with the model that sees
        known |= names_of(transformers.Gemma3Config()) | {"get_text_config"}
    assert model_type == "gemma3" or names_asked_for(config) - known == set()


def other_values(name: str, value: Any) -> Iterator[Any]:
    """Values of a field that may change the model; transformers refuses what has the wrong type."""
    match name, value:
        case "per_layer_config", _:
            yield {"1": {"intermediate_size": 48}}
        case "rope_parameters", {"rope_theta": _}:
            yield from other_ropes(value)
        case "rope_parameters", dict():
            yield from ({**value, kind: rope} for kind in value for rope in other_ropes(value[kind]))
        case "layer_types", list():
            other = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
            yield [other[kind] for kind in value]
        case "no_rope_layers", list():
            yield [1 - rotates for rotates in value]
        case "mlp_only_layers", list():
            yield [0]
        case _, bool():
            yield not value
        case _, int():
            yield from (value + 1, value * 2, max(1, value // 2))
        case _, float():
            yield 3 * value + 0.5
        case _, str():
            yield from ("relu", "gelu")
        case _, None:
            yield from (5, 0.5, True, "relu")


def other_ropes(rope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in rope.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            yield {**rope, name: 2 * value}
        elif isinstance(value, list):
            yield {**rope, name: [3 * each for each in value]}
    yield {**rope, "partial_rotary_factor": 0.5}
    yield {**rope, "attention_factor": 0.5}
    yield {"rope_type": "linear", "rope_theta": rope["rope_theta"], "factor": 4.0}


@dataclasses.dataclass(frozen=True)
class Changed:
    """A tiny model of which one field is another one.

    Attributes:
        field: its name.
        value: the new one.
        document: the config.json.
        model: torch's; with the unchanged model's weights where it has the same tensors.
        same_tensors: whether it has.
        same_logits: whether these are the unchanged model's.
    """

    field: str
    value: Any
    document: Mapping[str, Any]
    model: Any
    same_tensors: bool
    same_logits: bool


@cache
def tokens() -> np.ndarray:
    return np.random.default_rng(7).integers(3, 250, (ROWS, LENGTH)).astype(np.int32)


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens()).long()).logits


def built(document: Mapping[str, Any]) -> Any:
    """Torch's model of a config.json; None where it refuses that."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(**document)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    except Exception:  # noqa: BLE001  (whatever it says, there is no model then)
        return None


def written(config: Any) -> dict[str, Any]:
    """All fields as config.json has them."""
    return json.loads(config.to_json_string(use_diff=False))


def changes(name: str) -> Iterator[Changed]:
    """Every change of a variant that torch can compute."""
    import torch

    config = transformers_config(name)
    document = written(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = built(document)
        rng = np.random.default_rng(3)
        with torch.no_grad():
            for key, parameter in base.named_parameters():
                noise = 0.2 * torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
                around = 1 if re.search(r"(norm|ln_\w)\.weight$", key) and not VARIANTS[name].offset else 0
                parameter.copy_(around + noise)
        held, expected = base.state_dict(), logits(base)
        assert torch.isfinite(expected).all()
        for field in sorted(names_of(config) - NOT_TRIED):
            # An alias in the place of the field.
            without = {key: value for key, value in document.items() if key != config.attribute_map.get(field)}
            value = None if field == "per_layer_config" else getattr(config, field, None)
            for other in other_values(field, value):
                changed = {**without, field: other}
                model = built(changed)
                if model is None:
                    continue
                state = model.state_dict()
                same = {k: x.shape for k, x in state.items()} == {k: x.shape for k, x in held.items()}
                if not same:
                    yield Changed(field, other, changed, model, False, False)
                    continue
                model.load_state_dict(held)
                try:
                    found = logits(model)
                except (RuntimeError, TypeError, AttributeError):
                    continue  # it cannot compute with that value
                yield Changed(field, other, changed, model, True, torch.equal(found, expected))


def tensors_in_file(model: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """By the names that the model's file has, which for experts are not those of its modules."""
    from safetensors import safe_open

    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = file.keys()
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_changes_the_model_is_understood_or_refused(name, tmp_path):
    pytest.importorskip("torch")
    base = read_config(written(transformers_config(name))).config
    wrong, met = [], {"other tensors": 0, "other numbers": 0}
    for number, change in enumerate(changes(name)):
        if change.same_tensors and change.same_logits:
            continue
        try:
            bridged = read_config(change.document)
        except CheckpointError:
            continue
        if change.same_tensors:
            met["other numbers"] += 1
            if bridged.config == base:
                wrong.append((change.field, change.value, "other logits in torch, nothing changes here"))
            continue
        met["other tensors"] += 1
        theirs = tensors_in_file(change.model, tmp_path / str(number))
        mine = {
            name: expected.shape
            for expected in expected_tensors(bridged.config)
            for name in expected.names
            if name in theirs
        }
        if mine != theirs:
            wrong.append((change.field, change.value, sorted(set(mine.items()) ^ set(theirs.items()))[:4]))
    assert not wrong, wrong
    assert all(met.values()), met


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", VARIANTS)
def test_other_numbers_are_those_that_torch_has(name, tmp_path):
    """One change of each field, by the run's own plan, loader and Program; of variants, what they are about."""
    pytest.importorskip("torch")
    done, own = set(), None if name in ESSENTIAL else differing(name)
    for number, change in enumerate(changes(name)):
        if change.field in done or not change.same_tensors or change.same_logits:
            continue
        if own is not None and change.field not in own:
            continue
        try:
            read_config(change.document)
        except CheckpointError:
            continue
        done.add(change.field)
        folder = tmp_path / str(number)
        change.model.save_pretrained(folder)
        segments = np.zeros((ROWS, LENGTH), np.int32)
        expected = torch_logprobs(change.model, tokens(), segments)
        _, found = score(describe_folder(folder, positions=LENGTH), tokens(), segments)
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0, err_msg=f"{change.field} = {change.value}")
    assert done or own is not None


def differing(name: str) -> set[str]:
    """The fields that a variant has otherwise than its family's essential one; others are changed there."""
    config = transformers_config(name)
    (essential,) = (e for e in ESSENTIAL if isinstance(config, type(transformers_config(e))))
    mine, own = config.to_dict(), transformers_config(essential).to_dict()
    return {field for field in mine if mine[field] != own.get(field)}
