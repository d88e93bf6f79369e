"""`eval_needles`: transformers finds the same, on every mesh; killed runs go on; bad input is one error."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.family_models import make_checkpoint
from helpers.hf_folder import CONFIG, byte_level_tokenizer, tensors, write_folder
from safetensors.numpy import load_file, save_file

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.needles import run as needles_run
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.evaluate.needles.plan import bos_id
from levanter.compat.open import load_tokenizer
from levanter.config import load_written
from levanter.eval.needles.prompts import build_prompts
from levanter.eval.needles.results import NeedleStore
from levanter.plan.target_from_name import pod_target

TASKS = ["niah_single_1", "niah_multiquery"]
RING = {
    "axes": {"data": 1, "context": 8},
    "compute_mapping": {"position": "context"},
    "attention_mapping": "ring",
}
_TWO = {"axes": {"data": 4, "context": 2}, "compute_mapping": {"position": "context"}}
EXCHANGES = {
    "gather": {**_TWO, "attention_mapping": "gather"},
    "gather_in_natural_order": {**_TWO, "attention_mapping": "gather", "position_order": "natural"},
    "heads": {**_TWO, "attention_mapping": "heads"},
    "ring": RING,
    "ring_and_heads": {
        "axes": {"data": 2, "ring": 2, "context": 2},
        "compute_mapping": {"position": ["ring", "context"]},
        "attention_mapping": {"position": "ring", "key_position": "ring", "kv_head": "context"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of 1,536 positions, which knows no more than that words follow one another."""
    folder = tmp_path_factory.mktemp("needles") / "model"
    config = {**CONFIG, "max_position_embeddings": 1536}
    # As transformers' own random weights, which are small: logits that f32 holds to five digits. The table is the head
    # too, so that the likeliest token is often the last one, as it is in numbers now and then.
    write_folder(
        folder,
        config=config,
        weights={
            name: each if "norm" in name else (0.2 * each.astype(np.float32)).astype(each.dtype)
            for name, each in tensors(config).items()
        },
    )
    return folder


def run(folder: Path, out: Path, *words: str, **more: object) -> int:
    given = {
        "hf_checkpoint": str(folder),
        "tasks": TASKS,
        "lengths": [1152, 1536],
        "samples": 2,
        "trainer": {"mp": "f32", "tracker": [], "log_dir": str(out.parent / "logs")},
        "output_path": str(out),
        **more,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / f"{out.name}.yaml"
    path.write_text(json.dumps(given))
    return run_entry_point(EvalNeedlesConfig, needles_run.main, ["--config_path", str(path), *words])


def samples(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def judged(folder: Path, lines: list[dict], lengths: list[int]) -> list[int]:
    """Compares answers with those of transformers; the ranks of what counts there."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(folder))
    spec = EvalNeedlesConfig(hf_checkpoint="x", tasks=TASKS, samples=2, lengths=lengths).spec
    made = build_prompts(spec, tokenizer.encode_with_offsets, bos=bos_id(tokenizer))
    mine = [each for some in made.values() for each in some]
    assert len(lines) == len(mine) == 4 * len(lengths)
    ranks = []
    for each, line in zip(mine, lines, strict=True):
        with torch.no_grad():
            logits = (
                model(torch.from_numpy(each.tokens[None].astype(np.int64))).logits[0, each.target_positions].numpy()
            )
        logits = logits.astype(np.float64)
        chosen = np.take_along_axis(logits, each.targets[:, None].astype(np.int64), 1)
        logprobs = chosen[:, 0] - np.log(np.exp(logits - logits.max()).sum(1)) - logits.max()
        np.testing.assert_allclose(line["logprobs"], logprobs, atol=2e-4, rtol=0)
        own = (logits > chosen).sum(1)
        ranks += own.tolist()
        found = [bool((own[each.owners == n] == 0).all()) for n in range(len(each.values))]
        assert line["found"] == found and line["values"] == list(each.values)
    return ranks


def test_transformers_finds_the_same_on_every_mesh(folder, tmp_path, capsys):
    trainer = {"mp": "f32", "tracker": [], "log_dir": str(tmp_path)}
    lengths = [1152]
    assert run(folder, tmp_path / "one", lengths=lengths, trainer=trainer | {"mesh": {"axes": {"data": 8}}}) == 0
    assert run(folder, tmp_path / "ring", lengths=lengths, trainer=trainer | {"mesh": RING}) == 0
    one, ring = samples(tmp_path / "one"), samples(tmp_path / "ring")
    assert len(one) == 4 and [each["ranks"] for each in one] == [each["ranks"] for each in ring]
    for a, b in zip(one, ring, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=2e-5, rtol=0)
    ranks = judged(folder, one, lengths)
    assert 0 in ranks and max(ranks) > 0, "otherwise nothing is compared"
    said = capsys.readouterr().out
    assert "values found" in said and "niah_multiquery" in said and "depth 100%" in said
    summary = json.loads((tmp_path / "one" / "results.json").read_text())
    assert summary["tasks"].keys() == set(TASKS) and summary["overall"].keys() == {"1152"}
    assert not (tmp_path / "one" / "parts").exists()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Path:
    """A Gemma 2: windows in every second layer, bounded scores and logits, four heads of keys and values."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("needles") / "gemma2"
    make_checkpoint("gemma2", folder)
    # Small, as those above: where logits are at their bound, two of them are the same in f32.
    file = folder / "model.safetensors"
    weights = {name: each if "norm" in name else np.float32(0.2) * each for name, each in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1536}))
    byte_level_tokenizer(259).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["folder", "windowed"])
def test_every_exchange_finds_the_same(family, tmp_path, request):
    folder = request.getfixturevalue(family)
    trainer = {"mp": "f32", "tracker": [], "log_dir": str(tmp_path)}
    lengths = [1152]
    assert run(folder, tmp_path / "one", lengths=lengths, trainer=trainer | {"mesh": {"axes": {"data": 8}}}) == 0
    one = samples(tmp_path / "one")
    assert max(judged(folder, one, lengths)) > 0
    for name, mesh in EXCHANGES.items():
        assert run(folder, tmp_path / name, lengths=lengths, trainer=trainer | {"mesh": mesh}) == 0
        lines = samples(tmp_path / name)
        for mine, alone in zip(lines, one, strict=True):
            # Two of a hundred logits can be as near as their sums are exact.
            assert np.abs(np.subtract(mine["ranks"], alone["ranks"])).max() <= 1, name
            np.testing.assert_allclose(mine["logprobs"], alone["logprobs"], atol=2e-5, rtol=0, err_msg=name)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_is_left_alone(folder, tmp_path, capsys, monkeypatch):
    whole = tmp_path / "whole"
    rows = {"mp": "f32", "tracker": [], "mesh": RING}
    assert run(folder, whole, trainer=rows) == 0
    real, written = NeedleStore.write, []

    def killed(self, number, answers):
        real(self, number, answers)
        written.append(number)
        if len(written) == 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(NeedleStore, "write", killed)
        with contextlib.suppress(KeyboardInterrupt):
            assert run(folder, out, trainer=rows) != 0
    parts = sorted((out / "parts").glob("part-*.json"))
    assert len(parts) == 3 and not (out / "results.json").exists()
    parts[1].write_text(parts[1].read_text().replace("0", "1", 3))
    # Another run does not go on with it, whatever the difference.
    assert run(folder, out, trainer=rows, seed=5) == 2
    said = capsys.readouterr().err
    assert "seed: there 0, now 5" in said and "if_exists: replace" in said
    assert run(folder, out, trainer=rows) == 0
    said = capsys.readouterr()
    assert "8 questions, 2 of them by an earlier run" in said.out and "is damaged" in said.err + said.out
    assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    before = (out / "results.json").stat().st_mtime_ns
    assert run(folder, out, trainer=rows) == 0
    said = capsys.readouterr().out
    assert "nothing to do" in said and "loading weights" not in said
    assert (out / "results.json").stat().st_mtime_ns == before
    assert run(folder, out, trainer=rows, seed=5, if_exists="replace") == 0
    assert json.loads((out / "results.json").read_text())["identity"]["seed"] == 5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tasks": ["niah_singl_1"]}, "'niah_singl_1' is none of niah_single_1, "),
        ({"tasks": ["niah_singl_1", "vtt"]}, "; did you mean `niah_single_1`"),
        ({"tasks": ["vt", "vt"]}, "tasks: vt is named more than once"),
        ({"lengths": []}, "lengths: none is given"),
        ({"lengths": [8]}, "lengths: 8 is below 16 tokens"),
        ({"lengths": [64]}, "niah_single_1: its shortest text has"),
        ({"lengths": [90_000_000]}, "lengths: 90,000,000 is above 16,777,216 tokens"),
        ({"samples": 0}, "samples"),
        ({"samples": 10**9}, "tokens, and the limit is 1,073,741,824; reduce samples to 199,728"),
        ({"hf_checkpoint": None}, "no model to evaluate"),
        ({"hf_checkpoint": "/not/here"}, "/not/here"),
        ({"if_exists": "keep"}, "if_exists"),
    ],
)
def test_bad_input_is_one_error(folder, tmp_path, capsys, changed, said):
    assert run(folder, tmp_path / "out", **changed) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err and "loading weights" not in told.out
    assert not list((tmp_path / "out").glob("*.json")) if (tmp_path / "out").exists() else True


def test_it_is_planned_for_a_pod_without_a_tokenizer_or_weights(folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    words = ["--hf_checkpoint", str(bare), "--lengths", "[512, 1536]", "--output_path", str(tmp_path / "out")]
    loaded = load_written(EvalNeedlesConfig, words)
    plan = needles_run.describe(loaded.config, pod_target("v4-8"), written=loaded.written)
    assert not plan.errors and [program.name for program in plan.computing] == ["needles_512", "needles_1536"]
    assert {each.program: each.executions for each in plan.workloads} == {"needles_512": 28, "needles_1536": 28}


def test_lengths_beyond_the_model_and_lengths_that_do_not_divide(folder, tmp_path):
    def checks(lengths: str, *words: str) -> list:
        given = ["--hf_checkpoint", str(folder), "--lengths", lengths, "--output_path", str(tmp_path / "out"), *words]
        loaded = load_written(EvalNeedlesConfig, given)
        plan = needles_run.describe(loaded.config, pod_target("v4-8"), written=loaded.written)
        return [plan, *(check.message for check in plan.checks if check.name == "lengths")]

    _, said = checks("[512, 4096]")
    assert "4,096 tokens exceed the model's max_seq_len, 1,536; it was not trained on longer texts" in said
    cut = ("--trainer.mesh.axes", "{data: 1, context: 4}", "--trainer.mesh.compute_mapping", "{position: context}")
    plan, *said = checks("[1022, 1536]", *cut)
    assert len(plan.errors) == 1 and "1022" in said[0]
