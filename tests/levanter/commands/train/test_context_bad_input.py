"""Positions cut in a way that cannot be, as a user of `train_lm` or `plan` meets it: exit code 2, what is printed."""

import json

import pytest

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train.lm.train_lm import TrainLmConfig, main
from levanter.main import plan
from levanter.runplan import BAD_INPUT, OK

CUT = {"position": "context"}


def document(folder, *, positions=64, heads=2, batch=8, cut=CUT, attention="ring", axes=(("context", 4),), **mesh):
    (folder / "numbers.jsonl").write_text(json.dumps({"text": " ".join(str(n * n % 61) for n in range(1200))}) + "\n")
    source = {"type": "url", "train_urls": [str(folder / "numbers.jsonl")]}
    sizes = {"hidden_dim": 64, "intermediate_dim": 64, "num_layers": 1, "num_heads": heads, "num_kv_heads": heads}
    return {
        "model": {"type": "llama", "max_seq_len": positions, **sizes},
        "data": {
            "tokenizer": "passthrough", "vocab_size": 64, "cache_dir": None,
            "components": {"numbers": {"source": source}},
        },
        "trainer": {
            "tracker": {"type": "noop"}, "require_accelerator": False, "num_train_steps": 2, "train_batch_size": batch,
            "log_dir": str(folder / "logs"), "checkpointer": {"base_path": str(folder / "checkpoints")},
            "mesh": {
                "axes": dict(axes),
                "compute_mapping": cut,
                "attention_mapping": attention,
                **mesh,
            },
        },
    }  # fmt: skip


def refused(folder, capsys, *, target=None, **changes) -> str:
    """What a run on eight CPU devices says, or a plan for a pod; nothing is written."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(document(folder, **changes)))
    words = ["--config_path", str(path)]
    capsys.readouterr()
    if target is None:
        code = run_entry_point(TrainLmConfig, main, words)
        said = capsys.readouterr().err
    else:
        code = plan.main(["train_lm", *words, "--target", target, "--no-compile"])
        said = "".join(capsys.readouterr())
    assert code == BAD_INPUT, said
    assert "Traceback" not in said and not (folder / "checkpoints").exists()
    return " ".join(said.split())


CASES = {
    "length in zigzag order": (
        dict(positions=60),
        ["(position_order: zigzag)", "60 positions % 8 = 4 → make it 56 or 64 positions"],
    ),
    "length in natural order": (
        dict(positions=62, position_order="natural"),
        ["62 positions % 4 = 2 → make it 60 or 64 positions"],
    ),
    "heads": (
        dict(attention="heads"),
        ["attention_mapping: kv_head → [model, context]: 2 kv_head", "1, 2; or use gather or ring"],
    ),
    "keys without queries": (
        dict(cut={}, attention={"key_position": "context"}),
        ["key_position → context, but position is not mapped", "→ compute_mapping: {position: context}"],
    ),
    "one axis for both": (
        dict(heads=4, attention={"kv_head": "context"}),
        ["kv_head and position are both mapped to mesh axis context", "{position: null}"],
    ),
    "fewer rows than shards": (
        dict(batch=1),
        ["batch 1 leaves 1 of 2 data shards idle", "trainer.mesh.compute_mapping: {position: context}"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_refused_with_what_would_be_right(case, tmp_path, capsys):
    changes, parts = CASES[case]
    message = refused(tmp_path, capsys, **changes)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("attention", "allowed", "parts"),
    [
        (
            "ring", False,
            [
                "position → context crosses slices (context)",
                "axes: {context: 2} in place of dcn_axes: {context: 2}",
                "trainer.mesh.allow_dcn: true, with attention_mapping: ring",
            ],
        ),
        (
            "gather", True,
            ["position → context crosses slices (context)", "→ attention_mapping: ring"],
        ),
    ],
)  # fmt: skip
def test_a_plan_between_slices_is_refused(attention, allowed, parts, tmp_path, capsys):
    mesh = dict(axes={}, dcn_axes={"context": 2}, allow_dcn=allowed)
    message = refused(tmp_path, capsys, target="2xv6e-4", positions=2048, attention=attention, **mesh)
    assert all(part in message for part in parts), message


def test_a_ring_between_slices_that_is_allowed_is_warned_of(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    given = document(tmp_path, positions=2048, axes={}, dcn_axes={"context": 2}, allow_dcn=True)
    path.write_text(json.dumps(given))
    assert plan.main(["train_lm", "--config_path", str(path), "--target", "2xv6e-4", "--no-compile"]) == OK
    said = " ".join("".join(capsys.readouterr()).split())
    assert "over context, across slices: every layer exchanges over DCN" in said


def test_runs_that_are_no_whole_blocks_for_a_tpu(tmp_path, capsys):
    said = refused(tmp_path, capsys, target="v6e-8", positions=512)
    assert "in a ring of 4 devices 512 positions are 8 runs of 64, and the kernel for TPUs takes" in said
    assert "make it 1024 positions, use fewer devices in the ring, attention_mapping: gather" in said


def test_everything_that_is_wrong_is_said_at_once(tmp_path, capsys):
    """Of the mesh; what depends on it, such as the rows of a shard, is looked at once it is one."""
    cut = {**CUT, "key_position": "context", "hed": "model"}
    said = refused(tmp_path, capsys, positions=60, cut=cut, attention={"kv_head": "context"}, position_order="zigzag")
    for part in (
        "error: 4 sharding errors",
        "compute mapping: key_position → context",
        "kv_head and position are both mapped to mesh axis context",
        "60 positions % 8 = 4 → make it 56 or 64 positions",
        "hed",
    ):
        assert part in said
