"""`serve` as a command: planned like `generate`, with an address, a key and a queue."""

import gc
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.golden import assert_golden
from helpers.hf_folder import write_folder

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.main import load_command_line
from levanter.commands.serve import serve
from levanter.commands.serve.config import ServeConfig
from levanter.config import ConfigError, load_written
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.report import render, to_json
from levanter.plan.report.serving import as_text, serving_sheets
from levanter.plan.verdict import Verdict

CONFIG = Path(__file__).parents[4] / "config/serve/llama3.1_70b_int8.yaml"
GIB = 1 << 30


def verdict(*words: str, target: str = "v5e-8") -> Verdict:
    """The plan of the shipped configuration, without a compiler."""
    loaded = load_written(ServeConfig, ["--config_path", str(CONFIG), *words])

    def describe(to):
        return serve.describe(loaded.config, to, written=loaded.written)

    return preflight(Question(target=target, describe=describe, provider="not asked", payload={}, compile=False))


def said(found: Verdict) -> str:
    return "\n".join(finding for stage in found.stages for finding in stage.findings)


@pytest.fixture(scope="module")
def planned():
    return verdict()


def test_70b_in_int8_on_eight_chips_of_v5e(planned):
    """15.75 GiB a chip, 8.35 of them weights; a row of 8,192 positions is 0.1587 GiB in int8 and 0.3125 in bfloat16."""
    assert planned.exit_code == 0
    values = to_json([planned])["verdicts"][0]["serving"]
    assert values["cache_dtype"] == "int8" and values["rows_automatic"]
    assert values["rows"] == values["rows_by_context"]["int8"]["8K"] >= 44
    assert values["rows_by_context"]["bfloat16"]["8K"] >= 21
    weights = sum(nbytes for name, nbytes in values["bytes"]["parts"].items() if name not in ("cache", "rows' state"))
    assert weights / GIB == pytest.approx(8.35, abs=0.01)
    assert values["bytes"]["row_bytes"] == 80 * 2 * 8192 * (128 + 2)
    full = values["decode"][-1]
    assert full["rows"] == values["rows"] and full["floor"]["binds"] == "weights"
    assert full["floor"]["seconds"] == pytest.approx((8.1 + 44 * 0.1587) * GIB / 819e9, rel=0.01)
    assert full["tokens_per_second_per_chip"] == pytest.approx(full["rows"] / full["floor"]["seconds"] / 8)


@pytest.mark.golden
def test_its_text(planned):
    assert_golden("report/serve_70b_v5e-8.txt", "\n".join(as_text(serving_sheets(planned))) + "\n")
    assert "serve on v5litepod-8" in render([planned])


def test_64_rows_do_not_fit_and_what_would_hold_them_is_said():
    found = verdict("--inference.max_rows", "64")
    assert found.exit_code == 3
    assert re.search(
        r"4[4-6] rows of 8,192 positions fit, 64 asked: inference\.max_rows: 4[4-6] \(or auto\)", said(found)
    )
    assert "inference.max_seq_len: 4096" in said(found)
    assert "v5litepod-16 with model 8 × group 2" in said(found)
    in_bfloat16 = verdict("--inference.max_rows", "40", "--inference.cache_dtype", "bfloat16")
    assert in_bfloat16.exit_code == 3
    assert "inference.cache_dtype: int8, 44 rows" in said(in_bfloat16)


def test_the_pod_that_is_named_holds_them():
    """What the refusal of 64 rows suggests is planned as it says."""
    mesh = ("--trainer.mesh.axes", "{data: 1, model: 8, group: 2}", "--trainer.mesh.shared_mapping")
    tensor = "{mlp: [model, group], heads: [model, group], vocab: [model, group]}"
    found = verdict("--inference.max_rows", "64", *mesh, tensor, target="v5e-16")
    assert found.exit_code == 0
    values = to_json([found])["verdicts"][0]["serving"]
    assert values["bytes"]["repeated"] == 2
    assert values["bytes"]["repeated_bytes"] == values["bytes"]["parts"]["cache"] // 2
    assert values["bytes"]["free_bytes"] > 0


def test_a_port_that_is_taken_is_known_before_a_weight_is_read(tmp_path, capsys, monkeypatch):
    write_folder(tmp_path / "model")
    monkeypatch.setattr("levanter.commands.generate.engine_setup.load_pretrained", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--hf_checkpoint", str(tmp_path / "model"), "--inference.max_rows", "8", "--trainer.mp", "f32"]
        assert run_entry_point(ServeConfig, serve.main, [*words, "--port", str(port)]) == 2
    shown = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be listened on" in shown and "→ port: 0" in shown


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"host": "0.0.0.0"}, r"host: 0\.0\.0\.0 accepts requests of other machines[^→]*→ api_key"),
        ({"host": "example.org"}, "accepts requests of other machines"),
        ({"port": 70_000}, r"port: must be .*65535"),
        ({"port": -1}, "port: must not be negative"),
        ({"drain_seconds": 0.0}, "drain_seconds: must be"),
        ({"max_queued_tokens": 0}, "max_queued_tokens: must be"),
        ({"hf_checkpoint": None}, "no model"),
    ],
    ids=str,
)
def test_addresses_and_limits_are_checked(keys: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        ServeConfig(**{"hf_checkpoint": "acme/llama", **keys})


def test_whom_it_answers_is_in_the_plan(tmp_path):
    key = tmp_path / "key"
    addressed = verdict("--host", "0.0.0.0", "--api_key", str(key))
    assert f"api_key: {key}: no such file" in said(addressed)
    assert addressed.plan is not None
    (address,) = [check.message for check in addressed.plan.checks if check.name == "address"]
    assert address == (
        f"0.0.0.0:8000, to requests with the key in {key}; 65,536 tokens of prompts may wait, 30 s to end"
    )
    key.write_text("long-enough\n")
    assert "api_key" not in said(verdict("--host", "0.0.0.0", "--api_key", str(key)))
    named = said(verdict("--host", "0.0.0.0", "--api_key", "env:NO_SUCH_VARIABLE"))
    assert "there is no environment variable NO_SUCH_VARIABLE" in named
    for host in ("localhost", "127.0.0.1", "::1"):
        assert ServeConfig(hf_checkpoint="acme/llama", host=host).is_local


@pytest.mark.parametrize(
    "words",
    [(), ("--inference.penalties", "false"), ("--inference", "{max_seq_len: 512, steps: 2}"), ("--inference", "{}")],
    ids=" ".join,
)
def test_as_many_rows_as_there_is_room_for_whatever_else_is_said_of_them(words: tuple[str, ...]):
    loaded = load_written(ServeConfig, ["--hf_checkpoint", "acme/llama", *words])
    assert loaded.config.inference.max_rows == loaded.config.generating.inference.max_rows == "auto"


def test_rows_that_are_said_are_taken():
    loaded = load_written(ServeConfig, ["--hf_checkpoint", "acme/llama", "--inference.max_rows", "8"])
    assert loaded.config.inference.max_rows == 8


def test_a_misspelt_key_is_told_the_nearest():
    with pytest.raises(ConfigError, match="api_key"):
        load_written(ServeConfig, ["--config_path", str(CONFIG), "--api_kye", "x"])


def test_threads_take_short_turns_while_requests_are_answered():
    before = sys.getswitchinterval()
    with serve.short_turns():
        assert sys.getswitchinterval() == pytest.approx(serve.TURN)
    assert sys.getswitchinterval() == before


def test_garbage_is_looked_for_less_often_while_requests_are_answered():
    before = gc.get_threshold()
    with serve.rare_collections():
        assert gc.get_threshold() == (serve.NEW_OBJECTS, *before[1:])
    assert gc.get_threshold() == before


def test_the_name_of_the_model():
    def names(**keys: Any) -> tuple[str, ...]:
        work = SimpleNamespace(server=ServeConfig(**{"hf_checkpoint": "acme/llama@main", **keys}))
        return serve.model_names(cast("serve.ServeWork", work))

    assert names() == ("llama", "acme/llama@main")
    assert names(served_model_name="chat-1") == ("chat-1", "llama", "acme/llama@main")
    with pytest.raises(ValueError, match="served_model_name: expected a name"):
        names(served_model_name=" ")


def test_a_checkpoint_is_served_without_a_configuration():
    loaded = load_command_line("serve", ["acme/llama", "--port", "8080"], program="levanter serve")
    assert (loaded.config.hf_checkpoint, loaded.config.port) == ("acme/llama", 8080)
    with pytest.raises(ConfigError, match=r"did you mean --config_path demo\.yaml\?"):
        load_command_line("serve", ["demo.yaml"], program="levanter serve")
    with pytest.raises(ConfigError, match="expected --key value, got 'acme/llama'"):
        load_command_line("train_lm", ["acme/llama"], program="levanter train_lm")
