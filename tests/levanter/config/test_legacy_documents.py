"""Whole documents of both generations: what they resolve to here is golden, and equals what they meant upstream.

Three things may differ: `heads` cuts q, k, v and o; a mesh axis longer than the KV heads is factored; `vocab` is cut
where old tensor parallelism left it whole. Each is a line of the golden text of its document, anything else fails.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from helpers.golden import assert_golden
from helpers.legacy_documents import CASES, FOLDER, PHYSICAL, Case, Resolved, june_2026, resolved_2025, resolved_2026
from helpers.legacy_documents import written as written_document

from levanter.config import ConfigError, parse, parse_text, plain, read
from levanter.config.legacy.changes import inline
from levanter.main.migrate import config_class, migrate
from levanter.mesh import ModelAxes, ResolvedMesh, resolve
from levanter.models.absent import AbsentModelConfig
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.registry import LmConfig

VOCAB = 32_000
ASKING_TOO_MUCH = "model.scale_attn_by_inverse_layer_idx"
"""A key that some families' documents have and that is refused, with its reason, when they are read."""
WITHOUT_MEANING = ("reference_checkpoint", "use_flash_attention", "flash_attention_block_size")
"""Keys whose default changes no number: where weights come from is said, and null and true ask for the same kernels."""
ROPE_KEYS = ["type", "theta", "factor", "low_freq_factor", "high_freq_factor"]
ROPE_KEYS += ["original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"]


def relative(text: object) -> str:
    return str(text).replace(f"{FOLDER}/", "")


def sizes_of(model: LmConfig) -> dict[str, int]:
    """A model's axes; for a family that is not here, those that its keys say."""
    if not isinstance(model, AbsentModelConfig):
        return {axis.name: axis.size for axis in model.axes.values()}
    has = plain(model)
    embed = has.get("hidden_dim") or 48
    heads = has.get("num_heads", 1)
    kv_heads = has.get("num_kv_heads") or heads
    return {
        "embed": embed,
        "mlp": has.get("intermediate_dim") or has["mlp_scale"] * embed,
        "layers": has["num_layers"],
        "kv_head": kv_heads,
        "q_heads_per_group": heads // kv_heads,
        "head_size": has.get("head_dim") or embed // heads,
        **({"hyena_filter_order": 8} if has["type"] == "gpt2_hyena" else {}),
    }


def resolved_here(config: Any, *, devices: int, slices: int) -> ResolvedMesh:
    sizes = sizes_of(config.model)
    axes = ModelAxes(
        sizes={**sizes, "vocab": VOCAB, "position": config.model.max_seq_len},
        known={*KNOWN_AXES, *sizes},
        aliases=ALIASES,
    )
    return resolve(config.trainer.mesh, axes, devices=devices, granules=slices)


def meant(case: Case, *, devices: int, slices: int) -> Resolved:
    trainer = written_document(case)["trainer"]
    if "mesh" in trainer:
        return resolved_2026(trainer["mesh"], devices=devices, slices=slices)
    return resolved_2025(trainer, devices=devices, slices=slices)


def ways(mesh: Mapping[str, int], axes: tuple[str, ...], names: Mapping[str, str]) -> dict[str, int]:
    """Into how many pieces each of upstream's mesh axes cuts."""
    cut: dict[str, int] = {}
    for axis in axes:
        cut[names[axis]] = cut.get(names[axis], 1) * mesh[axis]
    return {name: count for name, count in cut.items() if count > 1}


def differences(case: Case, config: Any, *, devices: int, slices: int) -> list[str]:
    """Where we resolve a document otherwise than its generation did: one line each, of the three kinds there are.

    Raises:
        AssertionError: a difference that is of none of them.
    """
    old = meant(case, devices=devices, slices=slices)
    new = resolved_here(config, devices=devices, slices=slices)
    shape = dict(new.spec.shape)
    names = dict(PHYSICAL) if set(old.sizes) == set(PHYSICAL.values()) else {axis: axis for axis in shape}
    sizes: dict[str, int] = {}
    for axis, size in shape.items():
        sizes[names[axis]] = sizes.get(names[axis], 1) * size
    assert sizes == dict(old.sizes)
    found = []
    if shape.get("group", 1) > 1:
        found.append(f"model {old.sizes['model']} is factored into model {shape['model']} × group {shape['group']}")
    for what, theirs, ours in (
        ("compute", old.compute, new.mappings.compute),
        ("parameters", old.params, new.mappings.params),
    ):
        batch = config.trainer.mesh.batch_axis_name
        axes = {*theirs, *ours} - ({batch} if what == "parameters" else set())
        for axis in sorted(axes):
            spelled = ALIASES.get(axis, axis)
            before = ways(old.sizes, theirs.get(axis, ()), {name: name for name in old.sizes})
            now = ways(shape, ours.mesh_axes(spelled), names)
            if before == now:
                continue
            by_heads = "heads" in theirs and axis in ("heads", "kv_head", "q_heads_per_group")
            by_split = config.trainer.mesh.split_heads == "auto" and axis == "vocab" and not before
            assert by_heads or by_split, f"{what}: {axis} was cut by {before}, is cut by {now}"
            found.append(f"{what}: {axis} {shown(before)} → {shown(now)} ({'heads' if by_heads else 'vocab'})")
    return found


def shown(cut: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in cut.items()) or "whole"


def model_text(case: Case, model: LmConfig) -> str:
    """The model's keys that upstream has too, and those whose value is another one than upstream's."""
    ours = plain(model)
    kind = ours["type"]
    theirs = june_2026()["models"][kind]
    said = {("max_seq_len" if k == "seq_len" else k): v for k, v in written_document(case).get("model", {}).items()}
    lines = [f"type: {kind}"]
    for key, default in theirs.items():
        expected = said.get(key, default)
        value = ours.get(key, "(no such key)")
        if key == "rope":
            value = {name: value[name] for name in value if name in ROPE_KEYS}
        line = f"{key}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False).removesuffix('...').strip()}"
        lines.append(line.removesuffix("\n..."))
        if not same(expected, value):
            lines[-1] += f"    # upstream: {expected}"
    return "\n".join(lines)


def same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return all(same(theirs[key], ours[key]) for key in theirs if key in ours)
    if isinstance(theirs, str) and isinstance(ours, int | float):
        return float(theirs) == ours
    return theirs == ours


def described(case: Case) -> str:
    """The golden text of a document."""
    lines = []
    for entry_point in case.entry_points:
        lines += [f"=== {case.file} as {entry_point}", ""]
        try:
            loaded = read(config_class(entry_point), paths=[str(case.path)])
        except ConfigError as error:
            lines += ["refused:", f"  {relative(error)}", f"  (what follows is without {ASKING_TOO_MUCH})", ""]
            loaded = read(config_class(entry_point), paths=[str(case.path)], overrides={ASKING_TOO_MUCH: False})
        config = loaded.config
        lines += ["changes:"]
        lines += [f"  {relative(change)}" for change in loaded.changes] or ["  none"]
        for devices, slices in case.places:
            new = resolved_here(config, devices=devices, slices=slices)
            lines += ["", f"on {devices} devices in {slices} slice{'s' * (slices > 1)}: {new.spec}"]
            lines += [f"  parameters: {new.mappings.params}", f"  compute: {new.mappings.compute}"]
            lines += [f"  note: {note}" for note in new.notes]
            lines += [
                f"  unlike upstream: {line}" for line in differences(case, config, devices=devices, slices=slices)
            ]
        lines += ["", "model:", *(f"  {line}" for line in model_text(case, config.model).splitlines()), ""]
    return "\n".join(lines)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_document_means_what_it_meant(case: Case):
    assert_golden(f"legacy/resolved/{case.name}.txt", described(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_migrated_document_is_new_and_means_the_same(case: Case):
    done = migrate(str(case.path))
    assert bool(done.changes) == (case.name not in ("26_new_lora_dpo_tp4", "28_new_fsdp_over_slices"))
    for entry_point in case.entry_points:
        cls = config_class(entry_point)
        try:
            expected = parse(cls, paths=[str(case.path)])
        except ConfigError as error:
            assert ASKING_TOO_MUCH in str(error)  # noqa: PT017 — most documents are not refused
            with pytest.raises(ConfigError, match=ASKING_TOO_MUCH):
                parse_text(cls, done.text)
            continue
        assert parse_text(cls, done.text) == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_migrating_twice_changes_nothing(case: Case, tmp_path):
    once = migrate(str(case.path))
    path = tmp_path / "new.yaml"
    path.write_text(once.annotated)
    again = migrate(str(path))
    assert again.changes == ()
    assert again.text == once.text


def test_a_model_block_that_says_nothing_means_what_it_meant():
    """But for a few families: there the defaults are the published model's, where upstream's are another model's."""
    lines = []
    for kind, theirs in june_2026()["models"].items():
        ours = plain(LmConfig.get_known_choices()[kind]())
        assert set(theirs) - set(ours) == set(), kind
        for key, default in theirs.items():
            if not same(default, ours[key]) and key not in WITHOUT_MEANING:
                lines.append(f"{kind}.{key}: upstream {inline(default)}, here {inline(ours[key])}")
    assert "llama." not in "".join(lines) and "gpt2." not in "".join(lines)
    assert_golden("legacy/model_defaults.txt", "\n".join(lines))


@pytest.mark.parametrize("one", june_2026()["meshes"], ids=lambda one: f"{one['devices']}-{one['slices']}")
def test_meshes_resolve_as_in_june_2026(one: Mapping[str, Any]):
    """On a model without head axes, where `heads` has no meaning of our own, all of it is equal."""
    sizes = {"embed": 64, "mlp": 64, "vocab": 64, "position": 64}
    text = yaml.safe_dump({"trainer": {"mesh": one["mesh"]}})
    mesh = parse_text(config_class("train_lm"), text).trainer.mesh
    new = resolve(
        mesh, ModelAxes(sizes=sizes, known=KNOWN_AXES, aliases=ALIASES), devices=one["devices"], granules=one["slices"]
    )
    assert dict(new.spec.shape) == {**one["axes"], **one["dcn_axes"]}
    for ours, theirs in ((new.mappings.compute, one["compute"]), (new.mappings.params, one["params"])):
        expected = {a: (m,) if isinstance(m, str) else tuple(m or ()) for a, m in theirs.items() if a != "heads"}
        assert {axis: ours.mesh_axes(axis) for axis in expected} == expected
        assert {axis for axis in ours if ours.mesh_axes(axis)} == {axis for axis, to in expected.items() if to}
