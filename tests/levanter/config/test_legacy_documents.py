"""Whole documents of both generations: what they resolve to here is golden, and equals what they meant upstream.

Three things may differ: `heads` cuts q, k, v and o; a mesh axis longer than the KV heads is factored; `vocab` is cut
where old tensor parallelism left it whole. Each is a line of the golden file of its document, anything else fails.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from helpers.golden import Json, assert_golden, assert_golden_json, figures
from helpers.legacy_documents import CASES, FOLDER, PHYSICAL, Case, Resolved, june_2026, resolved_2025, resolved_2026
from helpers.legacy_documents import written as written_document
from helpers.plan_facts import mesh_facts

from levanter.commands.evaluate.gap.config import PerplexityGapConfig
from levanter.commands.model.defaults import UPSTREAM, default_notes
from levanter.commands.train.lm.train_lm import describe
from levanter.config import Change, ConfigError, Loaded, parse_text, plain, read, read_text
from levanter.mesh import ModelAxes, ResolvedMesh, mesh_report, resolve
from levanter.models import LlamaConfig
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.models.registry import LmConfig
from levanter.models.unsupported import AbsentModelConfig
from levanter.runplan import Target
from levanter.upstream.migrate import config_class, migrate

VOCAB = 32_000
SAMPLES = ("21_eval_llama3", "23_eval_careless_405b")
"""Whose changes and notes are golden in words too."""
NEW = ("28_new_fsdp_over_slices", "30_new_lora_lm", "34_new_train_dpo_lora", "37_new_eval_harness")
NEW += ("39_new_perplexity_gap",)
"""Documents of which nothing is translated."""
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


def architecture(config: Any) -> LmConfig | None:
    """The model's keys that a configuration has; of a comparison those of its last model."""
    blocks = config.models.values() if isinstance(config, PerplexityGapConfig) else [config]
    return [block.model for block in blocks][-1]


def resolved_here(config: Any, *, devices: int, slices: int) -> ResolvedMesh:
    # Whoever takes a checkpoint's architecture names none: then any model's axes will do.
    model = architecture(config) or LlamaConfig()
    sizes = sizes_of(model)
    axes = ModelAxes(
        sizes={**sizes, "vocab": VOCAB, "position": model.max_seq_len},
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


def assert_printed(differences: list[str], new: ResolvedMesh, *, devices: int, slices: int) -> None:
    """Each difference is in what a run prints: its notes, or the lines about the mesh at its start."""
    target = Target(name="somewhere", platform="tpu", kind="TPU v4", devices=devices, granules=slices, hosts=slices)
    said = [*new.notes, *mesh_report(new.spec, target, mappings=new.mappings).splitlines()]
    for line in differences:
        if " is factored into " in line:
            word = "was factored into"
        elif line.endswith("(vocab)"):
            word = "vocab → "
        else:
            word = "shards q"
        assert any(word in each for each in said), f"{line} is not printed:\n" + "\n".join(said)


def shown(cut: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in cut.items()) or "whole"


def model_facts(case: Case, model: LmConfig) -> dict[str, Json]:
    """The model's keys that upstream has too; where the value is another one than upstream's, both."""
    ours = plain(model)
    kind = ours["type"]
    theirs = june_2026()["models"][kind]
    document = written_document(case)
    # Of a comparison its last model.
    block = document.get("model_b") or document
    block = block.get("model", {}).get("model") or block.get("model", {})
    said = {("max_seq_len" if k == "seq_len" else k): v for k, v in block.items()}
    facts: dict[str, Json] = {"type": kind}
    for key, default in theirs.items():
        expected = said.get(key, default)
        value = ours.get(key, "(no such key)")
        if key == "rope":
            value = {name: value[name] for name in value if name in ROPE_KEYS}
        facts[key] = value if same(expected, value) else {"here": value, "upstream": expected}
    return facts


def same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return all(same(theirs[key], ours[key]) for key in theirs if key in ours)
    if isinstance(theirs, str) and isinstance(ours, int | float):
        return float(theirs) == ours
    return theirs == ours


def loaded(case: Case, entry_point: str) -> tuple[Loaded, str]:
    """A document as an entry point reads it, and its refusal where one key has to be left out for that."""
    cls = config_class(entry_point)
    try:
        return read(cls, paths=[str(case.path)]), ""
    except ConfigError as error:
        return read(cls, paths=[str(case.path)], overrides={ASKING_TOO_MUCH: False}), relative(error)


def change_facts(change: Change) -> dict[str, Json]:
    """What became of a key, without the sentence that says why."""
    where = relative(change.mark or "(not written)")
    return {"where": where, "key": change.key, "was": change.was, "now": change.now, "kind": change.kind}


def described_facts(case: Case) -> dict[str, Json]:
    """The golden facts of a document: by entry point its changes, its meshes on each place, its model."""
    facts: dict[str, Json] = {}
    for entry_point in case.entry_points:
        found, refusal = loaded(case, entry_point)
        config = found.config
        places: dict[str, Json] = {}
        for devices, slices in case.places:
            new = resolved_here(config, devices=devices, slices=slices)
            unlike = differences(case, config, devices=devices, slices=slices)
            assert_printed(unlike, new, devices=devices, slices=slices)
            places[f"{devices} devices in {slices} slice{'s' * (slices > 1)}"] = {
                "mesh": mesh_facts(new.spec),
                "params": str(new.mappings.params),
                "compute": str(new.mappings.compute),
                "notes": [figures(note) for note in new.notes],
                "unlike_upstream": unlike,
            }
        facts[entry_point] = {
            "refused": figures(refusal),
            "changes": [change_facts(change) for change in found.changes],
            "places": places,
            "model": None if (model := architecture(config)) is None else model_facts(case, model),
        }
    return facts


def described_in_words(case: Case) -> str:
    """What a user of an old document is told: every change, and what is noted about the mesh."""
    lines = []
    for entry_point in case.entry_points:
        found, _ = loaded(case, entry_point)
        lines += [f"=== {case.file} as {entry_point}", "", "changes:"]
        lines += [f"  {relative(change)}" for change in found.changes] or ["  none"]
        for devices, slices in case.places:
            new = resolved_here(found.config, devices=devices, slices=slices)
            lines += ["", f"on {devices} devices in {slices} slice{'s' * (slices > 1)}: {new.spec}"]
            lines += [f"  note: {note}" for note in new.notes]
    return "\n".join(lines)


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_document_means_what_it_meant(case: Case):
    assert_golden_json(f"legacy/resolved/{case.name}.json", described_facts(case))


@pytest.mark.golden
@pytest.mark.parametrize("name", SAMPLES)
def test_what_an_old_document_is_told_in_words(name: str):
    (case,) = [case for case in CASES if case.name == name]
    assert_golden(f"legacy/resolved/{name}.txt", described_in_words(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_migrated_document_is_new_and_means_the_same(case: Case):
    for entry_point in case.entry_points:
        done = migrate(str(case.path), entry_point)
        assert bool(done.changes) == (case.name not in NEW)
        cls = config_class(entry_point)
        try:
            expected = read(cls, paths=[str(case.path)])
        except ConfigError as error:
            assert ASKING_TOO_MUCH in str(error)  # noqa: PT017 — most documents are not refused
            with pytest.raises(ConfigError, match=ASKING_TOO_MUCH):
                parse_text(cls, done.text)
            continue
        again = read_text(cls, done.text)
        assert again.config == expected.config
        assert again.written.not_carried == expected.written.not_carried


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_migrating_twice_changes_nothing(case: Case, tmp_path):
    once = migrate(str(case.path))
    path = tmp_path / "new.yaml"
    path.write_text(once.annotated)
    again = migrate(str(path))
    assert again.changes == ()
    assert again.text == once.text


def test_a_model_block_that_says_nothing_means_what_it_meant():
    """But for a few families: there the defaults are the published model's, and the table of them is complete."""
    differing = {}
    for kind, theirs in june_2026()["models"].items():
        ours = plain(LmConfig.get_choice_class(kind)())
        assert set(theirs) - set(ours) == set(), kind
        keys = {k: v for k, v in theirs.items() if not same(v, ours[k]) and k not in WITHOUT_MEANING}
        if keys:
            differing[kind] = keys
    assert differing == UPSTREAM


@pytest.mark.parametrize("kind", sorted(UPSTREAM))
def test_what_a_document_relies_on_is_said(kind: str, tmp_path):
    """A line for each key it leaves out, by `train_lm` and `plan`, and by `migrate`; none for what it writes."""
    path = tmp_path / "old.yaml"
    path.write_text(f"model: {{type: {kind}, seq_len: 64}}\n")
    expected = [key for key in UPSTREAM[kind] if key != "max_seq_len"]
    notes = migrate(str(path), "train_lm").notes
    assert [note.split()[0] for note in notes] == [f"model.{key}" for key in expected]
    loaded = read(config_class("train_lm"), paths=[str(path)])
    checks = default_notes(loaded.config.model, loaded.written.below("model"))
    assert [check.message for check in checks] == list(notes) and {check.status for check in checks} == {"note"}
    written_down = yaml.safe_dump({"model": {"type": kind, **UPSTREAM[kind]}})
    path.write_text(written_down)
    loaded = read(config_class("train_lm"), paths=[str(path)])
    assert default_notes(loaded.config.model, loaded.written.below("model")) == []


@pytest.mark.parametrize("entry_point", ["eval_lm", "viz_logprobs"])
def test_an_evaluation_reads_rows_of_the_length_it_read(entry_point: str, tmp_path):
    """In 2025 that was the model's; a document that says it otherwise, or is new, is left alone."""
    path = tmp_path / "old.yaml"
    path.write_text("checkpoint_path: a\nmodel: {type: llama, seq_len: 96}\n")
    cls = config_class(entry_point)
    loaded = read(cls, paths=[str(path)])
    assert (loaded.config.max_eval_length, loaded.config.model.max_seq_len) == (96, 96)
    assert str(loaded.changes[0]) == (
        f"{path}:2: model.seq_len: 96 → max_eval_length: 96 "
        "(evaluations of that generation used rows of the model's length)"
    )
    assert parse_text(cls, migrate(str(path), entry_point).text) == loaded.config
    assert "it also sets max_eval_length: 96" in migrate(str(path)).notes[0]
    default = cls(checkpoint_path="a").max_eval_length
    for text, expected in (
        ("max_eval_length: 32\nmodel: {type: llama, seq_len: 96}", 32),
        ("model: {type: llama, max_seq_len: 96}", default),
    ):
        assert parse_text(cls, f"checkpoint_path: a\n{text}").max_eval_length == expected


def test_a_plan_says_what_it_takes_where_upstream_took_another_thing():
    small = "hidden_dim: 32, intermediate_dim: 48, num_heads: 4, head_dim: 8, max_seq_len: 64, vocab_size: 64"
    text = f"model: {{type: gemma2, {small}, num_layers: 2}}\ndata: {{tokenizer: passthrough, vocab_size: 64}}\n"
    target = Target(name="local", platform="cpu", kind="cpu", devices=8)
    plan = describe(parse_text(config_class("train_lm"), text + "trainer: {train_batch_size: 8}\n"), target)
    said = [line.strip() for line in plan.report().splitlines() if " is not set: " in line]
    assert len(said) == 2, plan.report()
    assert "model.num_kv_heads is not set: 4 here (gemma2 as published), 1 upstream; set it to choose" in said[0]
    assert "model.sliding_window is not set: 4096 here (gemma2 as published), null upstream" in said[1]


@pytest.mark.parametrize("one", june_2026()["meshes"], ids=lambda one: f"{one['devices']}-{one['slices']}")
def test_meshes_resolve_as_in_june_2026(one: Mapping[str, Any]):
    """On a model without head axes, where `heads` has no meaning of our own, all of it is equal."""
    sizes = {"embed": 64, "mlp": 64, "vocab": 64, "position": 64}
    text = yaml.safe_dump({"trainer": {"mesh": one["mesh"]}})
    mesh = parse_text(config_class("train_lm"), text).trainer.mesh
    # Upstream ran meshes with axes that shard nothing; here they are refused unless a key allows them.
    mesh = replace(mesh, allow_idle_axes=[*mesh.axes, *mesh.dcn_axes])
    new = resolve(
        mesh, ModelAxes(sizes=sizes, known=KNOWN_AXES, aliases=ALIASES), devices=one["devices"], granules=one["slices"]
    )
    assert dict(new.spec.shape) == {**one["axes"], **one["dcn_axes"]}
    for ours, theirs in ((new.mappings.compute, one["compute"]), (new.mappings.params, one["params"])):
        expected = {a: (m,) if isinstance(m, str) else tuple(m or ()) for a, m in theirs.items() if a != "heads"}
        assert {axis: ours.mesh_axes(axis) for axis in expected} == expected
        assert {axis for axis in ours if ours.mesh_axes(axis)} == {axis for axis, to in expected.items() if to}


MISTAKES = """
data:
  configs:
    web: {train_url: [a.jsonl], cache_dir: x}
    pile: {id: acme/pile, splitz: [train]}
  train_weight: {web: 1}
  tokeniser: gpt2
model: {type: lama, seq_len: 128}
trainer:
  model_axis_size: "four"
  tensor_parallel_axes: mlp, heads
  num_train_steps: 10k
  checkpointer: {save_interval: 10x, keep: {every: 1000}}
  ray: {adress: foo}
optimizer: {type: adamw}
"""


def test_a_document_of_2025_is_told_all_its_mistakes_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_text(config_class("train_lm"), MISTAKES, source="old.yaml")
    said = {line.partition("old.yaml:")[2] for line in str(caught.value).splitlines()[1:]}
    assert {line.split(" (known")[0] for line in said} == {
        "4: data.configs.web.train_url: unknown key; did you mean `train_urls`?",
        "5: data.configs.pile.splitz: unknown key; did you mean `splits`?",
        "6: data.train_weight: unknown key; did you mean `train_weights`?",
        "7: data.tokeniser: unknown key; did you mean `tokenizer`?",
        "8: model.type: unknown type `lama`; did you mean `llama`?",
        "10: trainer.model_axis_size: expected an integer, got four",
        "11: trainer.tensor_parallel_axes: is a single string, 'mlp, heads'; write a list: [mlp, heads]",
        '12: trainer.num_train_steps: expected an integer, got "10k"',
        '13: trainer.checkpointer.save_interval: expected a duration such as 15m or null, got "10x"',
        "13: trainer.checkpointer.keep: expected a list of a mapping, got a mapping",
        "15: optimizer.type: unknown type `adamw`; did you mean `adam` or `adamH`?",
    }
