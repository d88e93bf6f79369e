"""`eval_careless_lm` as a user runs it: the same rows whatever the batch, the mesh, and however often it is killed.

That the numbers are right is in `tests/parity/test_memorization_parity.py`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.hf_folder import CONFIG, TEXTS, tensors, write_folder
from helpers.old_memorization import ONE_BOOK
from helpers.processes import run_together

from levanter.commands.cli.devices import local_target
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, describe, execute, main
from levanter.config import parse, read
from levanter.memorization.results import FULL, BookResult
from levanter.mesh import describe_devices
from levanter.runplan import Session, Target

pytestmark = pytest.mark.optimized

TEXT = "".join(word + " " for text in TEXTS for word in text.split(" ")) * 9
BASE = {
    "book_title": "A Small Book",
    "chunk_size": 20,
    "prompt_tokens": 12,
    "token_mode": True,
    "cursor_inc_tokens": 1,
    "eval_batch_size": 8,
    "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": 4, "model": 2}}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    where = tmp_path_factory.mktemp("inputs")
    weights = tensors()
    # As transformers' own random weights, which are small: logits that f32 holds to five digits.
    small = {name: w if "norm" in name else (0.1 * w.astype(np.float32)).astype(w.dtype) for name, w in weights.items()}
    write_folder(where / "model", weights=small)
    (where / "book.txt").write_text(TEXT)
    return where


def config_file(where, inputs, **changes):
    document = {
        "hf_checkpoint": str(inputs / "model"),
        "txt_path": str(inputs / "book.txt"),
        "output_base_path": str(where / "out"),
        **json.loads(json.dumps(BASE)),
    }
    for dotted, value in changes.items():
        at = document
        *parents, last = dotted.split("__")
        for key in parents:
            at = at.setdefault(key, {})
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    where.mkdir(exist_ok=True)
    path = where / "config.json"
    path.write_text(json.dumps(document))
    return str(path)


def run(path, *words):
    return run_entry_point(EvalCarelessLmConfig, main, ["--config_path", path, *words])


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, inputs):
    """A finished run, and its folder's files."""
    where = tmp_path_factory.mktemp("finished")
    assert run(config_file(where, inputs)) == 0
    return where / "out"


def test_a_run_leaves_what_it_promises(finished, inputs):
    names = set(files_of(finished))
    assert names == {
        *("windows.parquet", "manifest.json", "summary.json", "text.txt", "report.html", ".success"),
        *("heatmap.png", "heatmap.npy", "histogram.png", "np_curves.png", "pz_data.npz"),
    }
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["identity"]["text.characters"] == len(TEXT) and manifest["versions"]["jax"]
    assert str(finished) not in json.dumps(manifest), "equal runs have equal manifests wherever they are"
    result = BookResult.read(str(finished))
    assert result.text == TEXT and result.title == "A Small Book" and result.preset == "custom"
    assert len(np.load(finished / "pz_data.npz")["pz_values"]) == len(result) == manifest["windows"]


@pytest.mark.parametrize("batch", [4, 12, 400])
def test_no_row_comes_from_filling_up_the_last_batch(tmp_path, inputs, finished, batch):
    expected = BookResult.read(str(finished))
    assert run(config_file(tmp_path, inputs, eval_batch_size=batch)) == 0
    found = BookResult.read(str(tmp_path / "out"))
    assert len(expected) % 8 and len(found) == len(expected) and len(found) % batch
    np.testing.assert_array_equal(found.char_spans, expected.char_spans)
    np.testing.assert_allclose(found.log_pz(FULL), expected.log_pz(FULL), atol=1e-4, rtol=0)
    assert (found.log_pz(FULL) < -1).all(), "random weights know nothing by heart"


def test_the_same_run_gives_the_same_bytes(tmp_path, inputs, finished):
    assert run(config_file(tmp_path, inputs)) == 0
    assert files_of(tmp_path / "out") == files_of(finished)


@pytest.mark.parametrize("axes", ["{data: 1, model: 1}", "{data: 8, model: 1}", "{data: 2, model: 4}"])
def test_every_mesh_gives_the_same_rows(tmp_path, inputs, finished, devices, axes):
    overrides = {"trainer.mesh.axes": axes, "output_base_path": str(tmp_path / "out")}
    overrides["trainer.mesh.shared_mapping"] = "{mlp: model, heads: model, vocab: model}"
    if "4" in axes:  # two KV heads: the query groups take the other factor
        overrides["trainer.mesh.axes"] = "{data: 2, model: 2, group: 2}"
        overrides["trainer.mesh.shared_mapping"] = "{mlp: [model, group], heads: [model, group], vocab: [model, group]}"
    config = parse(EvalCarelessLmConfig, paths=[config_file(tmp_path, inputs)], overrides=overrides)
    used = devices[:1] if "data: 1" in axes else devices
    plan = describe(config, local_target(describe_devices(used, config.trainer.mesh))).check()
    (done,) = execute(plan, plan.mesh.build(used), Session())
    found, expected = BookResult.read(done.folder), BookResult.read(str(finished))
    np.testing.assert_array_equal(found.token_spans, expected.token_spans)
    np.testing.assert_allclose(found.log_pz(FULL), expected.log_pz(FULL), atol=1e-4, rtol=0)
    np.testing.assert_allclose(found.top_lse, expected.top_lse, atol=1e-5, rtol=0)


@pytest.mark.slow  # tests/multihost/test_eval.py has two processes that score what one does
def test_two_processes_give_the_same_rows(tmp_path, inputs, finished):
    command = ["levanter.main.eval_careless_lm", "--config_path", config_file(tmp_path, inputs)]
    run_together(tmp_path, 2, command, devices=4)
    found, expected = BookResult.read(str(tmp_path / "out")), BookResult.read(str(finished))
    np.testing.assert_array_equal(found.token_spans, expected.token_spans)
    np.testing.assert_allclose(found.log_pz(FULL), expected.log_pz(FULL), atol=1e-4, rtol=0)
    assert (tmp_path / "out" / ".success").exists()


def test_a_finished_run_is_left_alone(tmp_path, inputs, finished, capsys):
    shutil.copytree(finished, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(config_file(tmp_path, inputs)) == 0
    shown = capsys.readouterr()
    assert "A Small Book: nothing to do; its results are in" in shown.out
    assert "loading weights" not in shown.err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cursor_inc_tokens": 2}, ["windows.stride_tokens: there 1, now 2"]),
        ({"trainer__mp": "bfloat16"}, ["precision: there"]),
        ({"preset": "paper"}, ["windows.bos: there False, now True", "scheme: there 'full', now 'k40'"]),
        ({"txt_path": "other.txt"}, ["text.sha256: there", "text.characters: there"]),
        ({"hf_checkpoint": "other"}, ["model.weights: there"]),
        ({"schemes": ["k3"]}, ["schemes: there [], now ['k3']"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_does_not_continue_it(tmp_path, inputs, finished, capsys, change, named):
    shutil.copytree(finished, tmp_path / "out")
    if "txt_path" in change:
        (tmp_path / "other.txt").write_text(TEXT + "more")
        change = {"txt_path": str(tmp_path / "other.txt")}
    if "hf_checkpoint" in change:
        shutil.copytree(inputs / "model", tmp_path / "other")
        weights = bytearray((tmp_path / "other" / "model.safetensors").read_bytes())
        size = int.from_bytes(weights[:8], "little")
        start = json.loads(weights[8 : 8 + size])["model.norm.weight"]["data_offsets"][0]
        weights[8 + size + start] ^= 0x10
        (tmp_path / "other" / "model.safetensors").write_bytes(weights)
        change = {"hf_checkpoint": str(tmp_path / "other")}
    before = files_of(tmp_path / "out")
    assert run(config_file(tmp_path, inputs, **change)) == 2
    shown = capsys.readouterr().err
    assert "holds the results of another run" in shown and all(words in shown for words in named), shown
    assert "loading weights" not in shown and files_of(tmp_path / "out") == before


def test_replace_starts_over(tmp_path, inputs, finished):
    shutil.copytree(finished, tmp_path / "out")
    assert run(config_file(tmp_path, inputs, cursor_inc_tokens=3, if_exists="replace")) == 0
    assert len(BookResult.read(str(tmp_path / "out"))) < len(BookResult.read(str(finished))) / 2


@pytest.mark.slow
def test_several_books_are_one_load_and_each_is_its_own(tmp_path, inputs, capsys, caplog):
    (tmp_path / "short.txt").write_text(TEXT[:200])
    books = {
        "One Book": {"txt_path": str(inputs / "book.txt"), "cursor_inc_tokens": 4},
        "two": {"txt_path": str(tmp_path / "short.txt"), "book_title": "The Second", "prompt_tokens": 10},
    }
    tracker = {"type": "json_file", "output_path": str(tmp_path / "tracker")}
    path = config_file(tmp_path, inputs, txt_path=None, book_title=None, books=books, trainer__tracker=tracker)
    assert run(path) == 0
    shown = capsys.readouterr()
    assert caplog.text.count("loading weights: done") == 1 and "programs: score → score_2" in shown.out
    one, two = (BookResult.read(str(tmp_path / "out" / name)) for name in ("one_book", "two"))
    assert (one.title, two.title, two.suffix_tokens) == ("One Book", "The Second", 10)
    logged = [json.loads(line) for line in (tmp_path / "tracker" / "metrics.jsonl").read_text().splitlines()]
    said = {key: value for line in logged for key, value in line.get("metrics", {}).items()}
    assert said["One_Book/eval/windows_processed"] == said["One_Book/eval/total_windows"] == len(one)
    assert said["The_Second/eval/progress_percent"] == 100
    # One of them again: the other is left as it is.
    shutil.rmtree(tmp_path / "out" / "two")
    kept = files_of(tmp_path / "out" / "one_book")
    caplog.clear()
    assert run(path) == 0
    assert "One Book: nothing to do" in capsys.readouterr().out
    assert "scoring The Second: done" in caplog.text and "scoring One Book" not in caplog.text
    assert files_of(tmp_path / "out" / "one_book") == kept
    assert BookResult.read(str(tmp_path / "out" / "two")).logprobs.tobytes() == two.logprobs.tobytes()


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"cursor_inc_token": 3}, ["cursor_inc_token", "did you mean", "cursor_inc_tokens"]),
        ({"trainer__mesh__axes": {"data": 3, "model": 2}}, ["there are 8 devices"]),
        ({"trainer__mesh__shared_mapping": {"embd": "data"}}, ["did you mean embed?"]),
        ({"preset": "papr"}, ["preset: 'papr' is not one of levanter, paper"]),
        ({"scheme": "top40"}, ["'top40' is not a scheme"]),
        ({"prompt_tokens": 20}, ["prompt_tokens 20 of chunk_size 20"]),
        ({"eval_batch_size": 6}, ["6 windows do not divide over the 4 batch shards", "eval_batch_size: 4 or 8"]),
        ({"chunk_size": 100}, ["windows of 100 tokens exceed the model's max_seq_len, 64"]),
        ({"txt_path": "/nowhere/book.txt"}, ["/nowhere/book.txt: no such file"]),
        ({"txt_path": None}, ["no book: give txt_path"]),
        ({"hf_checkpoint": "/nowhere/model"}, ["/nowhere/model"]),
        ({"coverage_threshold": 2}, ["coverage_threshold"]),
        ({"books": {"a": {"txt_path": "x"}}}, ["txt_path and books"]),
        ({"eval_batch_size": 6, "txt_path": "/nowhere/b.txt"}, ["2 problems", "do not divide", "no such file"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_said_before_a_weight_is_read(tmp_path, inputs, capsys, change, messages):
    assert run(config_file(tmp_path, inputs, **change)) == 2
    shown = capsys.readouterr().err
    assert all(message in shown for message in messages), shown
    assert "Traceback" not in shown and "loading weights" not in shown


@pytest.mark.parametrize(
    "content", [b"", b" \n\n ", b"caf\xe9 and more", b"short"], ids=["empty", "blank", "latin-1", "short"]
)
def test_a_text_that_cannot_be_scored_is_said_before_a_weight_is_read(tmp_path, inputs, capsys, content):
    (tmp_path / "bad.txt").write_bytes(content)
    assert run(config_file(tmp_path, inputs, txt_path=str(tmp_path / "bad.txt"))) == 2
    shown = capsys.readouterr().err
    expected = {b"caf": "not UTF-8: byte 0xe9 at offset 3", b"sho": "no window of 20 tokens"}
    assert expected.get(content[:3], "no text to score") in shown and "loading weights" not in shown


def test_a_folder_that_cannot_be_written_is_said_before_a_weight_is_read(tmp_path, inputs, capsys):
    (tmp_path / "file").write_text("not a folder")
    assert run(config_file(tmp_path, inputs, output_base_path=str(tmp_path / "file" / "out"))) == 2
    shown = capsys.readouterr().err
    assert "output_base_path" in shown and "cannot be" in shown and "loading weights" not in shown


def test_an_upstream_model_block_of_another_model_is_noted(tmp_path, inputs, capsys):
    """Upstream's 8B document carries a 70B block, which its loader never sees."""
    block = {"type": "llama", "seq_len": 64, "hidden_dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
    changes = {"model": block, "cursor_inc_tokens": 30}
    assert run(config_file(tmp_path / "one", inputs, use_hf_model_config=False, **changes)) == 0
    assert "the checkpoint's architecture is used" in capsys.readouterr().out
    assert run(config_file(tmp_path / "two", inputs, **changes)) == 2
    assert "model.hidden_dim" in capsys.readouterr().err


def test_the_old_document_runs_as_it_is(tmp_path, inputs, capsys):
    """Its paths are other ones, and it has 8 devices instead of 128; the block of the model is not this model's."""
    write_folder(tmp_path / "model", config={**CONFIG, "max_position_embeddings": 128})
    changes = {
        "books/a.txt": str(inputs / "book.txt"),
        "meta-llama/Llama-3.1-8B": str(tmp_path / "model"),
        "/models/Llama-3-1-405B": str(tmp_path / "model"),
        "gs://bucket/books/": str(tmp_path / "out"),
        "type: wandb": "type: noop",
        '    project: "books"\n    tags: ["llama3", "eval"]\n    name: "a_run"\n': "",
        "model_axis_size: 128": "model_axis_size: 2",
        "eval_batch_size: 1": "eval_batch_size: 4",
    }
    document = ONE_BOOK
    for old, new in changes.items():
        assert old in document
        document = document.replace(old, new)
    (tmp_path / "old.yaml").write_text(document)
    assert run(str(tmp_path / "old.yaml")) == 0
    result = BookResult.read(str(tmp_path / "out"))
    assert result.title == "A Book" and result.preset == "levanter" and (np.diff(result.token_spans[:, 0]) == 5).all()
    assert {"bar_plot.png", "bar_plot.npy", "histogram.png", "pz_data.npz"} <= set(files_of(tmp_path / "out"))
    assert "the checkpoint's architecture is used" in capsys.readouterr().out


POD = Target(name="v4-256", platform="tpu", kind="TPU v4", devices=128, hosts=32, hbm_bytes=int(30.75 * 2**30))


def test_planning_needs_neither_text_nor_tokenizer_nor_weights():
    config = parse(EvalCarelessLmConfig, paths=["config/memorization/llama3.1_405b_v4-256.yaml"])
    plan = describe(config, POD)
    assert plan.errors == () and plan.exit_code == 0
    assert {check.name for check in plan.checks if check.status == "unchecked"} == {"text", "tokenizer", "weights"}
    (work,) = plan.workloads
    windows = (108_000 - 100) // 5 + 1
    assert (
        work.executions == -(-windows // config.eval_batch_size) and "21,581 windows in 108,000 tokens" in work.reason
    )
    # 405,853,388,800 parameters of which the embedding multiplies nothing, and the head half of the tokens only.
    body = 405_853_388_800 - 2 * 128256 * 16384 - 16384 * (2 * 126 + 1)
    flops = 2 * 100 * body + 2 * 50 * 128256 * 16384 + 4 * 126 * 16384 * 100 * 100
    assert work.flops_full / work.items == pytest.approx(flops, rel=1e-6)
    assert work.flops_full / work.items == pytest.approx(8.06e13, rel=2e-3)


def test_every_config_describes_itself():
    for path in sorted(Path("config/memorization").glob("*.yaml")):
        loaded = read(EvalCarelessLmConfig, paths=[str(path)])
        small = Target(name="v4-8", platform="tpu", kind="TPU v4", devices=4)
        plan = describe(loaded.config, POD if "405b" in path.name else small, written=loaded.written)
        assert plan.workloads and all(work.executions for work in plan.workloads), path.name
        broken = [str(error) for error in plan.errors]
        assert not broken or "as_published" in path.name, broken


SLOWLY = """
import sys, time
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, main
from levanter.commands.cli.errors import run_entry_point
from levanter.memorization.partial_results import PartStore
own = PartStore.write
PartStore.write = lambda *args: (time.sleep(0.03), own(*args))[1]
sys.exit(run_entry_point(EvalCarelessLmConfig, main))
"""
"""The command with parts that take their time: whoever kills it is not always quicker than a hundred small ones."""


def killed_at_random(path, folder, kills, *, seed):
    """Starts the command `kills` times and kills it -9 at a random moment; then lets it finish."""
    moments = random.Random(seed)
    command = [sys.executable, "-m", "levanter.main.eval_careless_lm", "--config_path", path]
    slowly = [sys.executable, "-c", SLOWLY, "--config_path", path]
    parts = Path(folder) / "parts"
    struck = 0
    for _ in range(kills):
        process = subprocess.Popen(slowly, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        begin = len(list(parts.glob("part-*"))) if parts.exists() else 0
        wanted = begin + moments.choice([0, 1, 1, 2, 3, 5, 8])
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if parts.exists() and len(list(parts.glob("part-*"))) >= wanted:
                break
            time.sleep(0.005)
        time.sleep(moments.random() * 0.1)
        struck += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=240)
    assert last.returncode == 0, last.stderr[-4000:]
    return struck


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, inputs):
    where = tmp_path_factory.mktemp("uninterrupted")
    assert run(config_file(where, inputs, eval_batch_size=4)) == 0
    return files_of(where / "out")


# Of runs whose parts a killed one left, `generate` (inference/test_jsonl.py) is in `make test`.
@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, inputs, uninterrupted):
    path = config_file(tmp_path, inputs, eval_batch_size=4, save_seconds=0)
    assert killed_at_random(path, tmp_path / "out", 2, seed=0) >= 1
    assert files_of(tmp_path / "out") == uninterrupted


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_with_the_same_bytes(tmp_path, inputs, uninterrupted):
    path = config_file(tmp_path, inputs, eval_batch_size=4, save_seconds=0)
    assert killed_at_random(path, tmp_path / "out", 10, seed=1) >= 5
    assert files_of(tmp_path / "out") == uninterrupted
