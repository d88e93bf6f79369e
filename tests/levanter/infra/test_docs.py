"""What documents say of launching: commands are understood, texts are those that are printed, numbers are the code's.

`make golden` writes what `--dry_run` prints into `docs/405b.md`.
"""

import os
import re
import shlex
from datetime import timedelta
from pathlib import Path

import pytest

from levanter import runplan
from levanter.distributed.initialize import DistributedConfig
from levanter.distributed.peers import Timeouts
from levanter.infra import errors
from levanter.infra.flags import COMMANDS, command_parser
from levanter.infra.launch import main
from levanter.infra.ray_run import make_parser as ray_parser
from levanter.infra.ray_serve import make_parser as replicas_parser
from levanter.infra.tpu_vm import RetryPolicy

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("405b", "launch", "multihost")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Every `python -m levanter.infra.…` in a block."""
    joined = text.replace("\\\n", " ")
    return [
        re.sub(r"\s+", " ", line).strip()
        for block in re.findall(r"^```\w*\n(.*?)^```$", joined, re.S | re.M)
        for line in block.splitlines()
        if line.startswith("python -m levanter.infra.")
    ]


@pytest.mark.parametrize(("name", "command"), [(name, each) for name in PAGES for each in commands(page(name))])
def test_a_command_is_understood(name, command, capsys, monkeypatch, tmp_path):
    if "…" in command:
        pytest.skip("a form, not a command")
    monkeypatch.chdir(tmp_path)
    module, *words = shlex.split(command)[2:]
    if module.endswith("ray_run"):
        own = words[: words.index("--")] if "--" in words else words
        assert ray_parser().parse_args(own).tpu
        return
    if module.endswith("ray_serve"):
        assert replicas_parser().parse_args(words[: words.index("--")]).replicas > 1
        return
    if "local" in words:
        own = words[1 : words.index("--")]
        assert command_parser("local").parse_args(own).processes > 1
        return
    at = 1 if words[0] in COMMANDS else 0
    assert main([*words[:at], "--dry_run", *words[at:]]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_there_are_commands():
    assert len(commands(page("405b"))) >= 4 and len(commands(page("launch"))) >= 3


@pytest.mark.golden
def test_the_dry_run_of_the_walk_is_todays(capsys, monkeypatch, tmp_path):
    text = page("405b")
    (command,) = [each for each in commands(text) if "--autodelete" in each]
    # The line above the command sets it.
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    assert main(["--dry_run", *shlex.split(command)[3:]]) == 0
    printed = capsys.readouterr().out.split("\n# setup.sh\n")[0]
    block = re.compile(r"(as `--dry_run` prints them.*?:\n\n```\n)(.*?)(```\n)", re.S)
    found = block.search(text)
    assert found is not None
    if os.environ.get("UPDATE_GOLDEN"):
        (DOCS / "405b.md").write_text(text[: found.start(2)] + printed + text[found.end(2) :], encoding="utf-8")
    else:
        assert found[2] == printed, "`make golden` writes the page anew"


def test_exit_codes_are_the_codes():
    codes = {
        runplan.OK: "done",
        runplan.BAD_INPUT: "bad input",
        runplan.PEER_LOST: "peer",
        runplan.PREEMPTED: "preempted",
        runplan.INTERNAL_ERROR: "internal error",
        runplan.INTERRUPTED: "Ctrl-C",
    }
    (said,) = re.findall(r"Exit codes a launcher sees: (.*?)\n\n", page("multihost").replace("\n", " ") + "\n\n", re.S)
    listed = dict(re.findall(r"(?:^|; )(\d+) ([^;.]*)", said.split(". When")[0]))
    assert {int(code) for code in listed} == set(codes)
    assert all(codes[int(code)] in text for code, text in listed.items()), listed
    for name in ("OK", "INTERNAL_ERROR", "BAD_INPUT", "DOES_NOT_FIT", "COMPILER_CRASH", "PEER_LOST", "PREEMPTED"):
        assert getattr(errors, name) == getattr(runplan, name)
    assert errors.INTERRUPTED == runplan.INTERRUPTED


def test_timeouts_are_the_timeouts():
    text, config = page("multihost"), DistributedConfig()
    for name, shown in (("init_timeout", "5 m"), ("barrier_timeout", "30 m"), ("heartbeat_timeout", "100 s")):
        assert re.search(rf"`trainer.distributed.{name}`\s\({shown}\)", text), name
        number, unit = shown.split()
        assert getattr(config, name) == timedelta(**{{"m": "minutes", "s": "seconds"}[unit]: int(number)})
    assert config.timeouts == Timeouts()


def test_defaults_are_the_defaults():
    text, asked = page("launch"), command_parser("tpu").parse_args([])
    assert "`--retries 10`, `--create_retries 20`" in text
    assert (asked.retries, asked.create_retries) == (10, 20) == (RetryPolicy().retries, RetryPolicy().create_retries)
    assert "retried after 30 s, 60 s, … 10 min" in text
    assert [RetryPolicy().seconds(n) for n in (1, 2, 9)] == [30, 60, 600]
    assert "`--restarts` times (3)" in text and ray_parser().parse_args([]).restarts == 3
    replicas = replicas_parser().parse_args([])
    assert "(`--drain_seconds`, 60)" in text and replicas.drain_seconds == 60
    assert "`127.0.0.1:8000`" in text and (replicas.host, replicas.port) == ("127.0.0.1", 8000)
    for flag in set(re.findall(r"`(--[a-z_]+)", text)) - {"--target", "--dry_run"}:
        words = [*(command_parser(name) for name in COMMANDS), ray_parser(), replicas_parser()]
        known = {option for one in words for option in one._option_string_actions} | {"--working-dir"}
        assert flag in known, flag


def test_what_it_costs_is_what_it_takes():
    """Chip-seconds of `docs/405b.md` are its seconds on 128 chips."""
    table = page("405b").split("| on v4-256, 128 chips |")[1]
    rows = re.findall(r"^\| (.*?) \| ([\d.,–]+) \| ([\d,–]+) \|$", table, re.M)
    assert len(rows) == 6
    for what, seconds, cost in rows:
        for took, chips in zip(numbers(seconds), numbers(cost), strict=True):
            assert chips == pytest.approx(128 * took, rel=0.006), what
    read, scored, together = (numbers(rows[n][1]) for n in (1, 2, 3))
    assert together == pytest.approx([read[0] + each for each in scored], rel=0.01)


def numbers(text: str) -> list[float]:
    """`73.6–110` → both ends."""
    return [float(each.replace(",", "")) for each in text.split("–")]
