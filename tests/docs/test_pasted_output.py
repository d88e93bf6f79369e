"""What the documents show is what the commands print; only times, rates and the like may differ.

Cheap commands run in `make test`, those that need the TPU compiler in `make test-aot`, the demonstration in
`make test-all`. A command that is not in one of the tables is cheap: a new pair is checked from its first day.
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import yaml
from helpers.documents import DOCUMENTS, ROOT, Block, Pair, blocks, missing, pairs, renewed, same_everywhere
from helpers.golden import updating

from levanter.config import load
from levanter.main.eval_lm import EvalLmConfig, describe
from levanter.plan.compilers import cuda_plugin
from levanter.runplan import RunRefused, Target

SLOW = ("make demo",)
"""Minutes on a CPU."""
COMPILED = (
    "python -m levanter.main.plan eval_lm --config_path config/eval/llama3.1_405b_as_published.yaml",
    "python -m levanter.main.plan eval_lm --config_path config/eval/llama3.1_405b_old_style.yaml",
    "python -m levanter.main.plan eval_lm --config_path config/eval/llama3.1_405b_v4-256.yaml",
    "python -m levanter.main.plan eval_careless_lm --config_path config/memorization/llama3.1_405b_v4-256.yaml",
    "python -m levanter.main.plan train_lm --config_path config/train/llama_0.78b_64k_v6e-8_as_published.yaml",
)
"""What the TPU compiler says."""
COMPILED_FOR_GPUS = (
    "python -m levanter.main.plan train_lm --config_path config/train/llama2_7b_v4-32.yaml --target h100",
)
"""What the GPU compiler says."""
NOT_RUN = {
    "python -m levanter.main.cache_dataset --config_path config/train/my_run.yaml": "the reader's own file; "
    "tests/levanter/data/test_store.py holds the message",
}
"""Begin of a command → why its output is not compared."""
ABSENT = re.compile(r"cannot be reached|cannot be asked|HF_HUB_OFFLINE")


def marked(pair: Pair) -> list[pytest.MarkDecorator]:
    if pair.command in SLOW:
        return [pytest.mark.slow, pytest.mark.timeout(1500)]
    if pair.command.startswith((*COMPILED, *COMPILED_FOR_GPUS)):
        return [pytest.mark.aot, pytest.mark.timeout(900)]
    return []


PAIRS = [pair for path in DOCUMENTS if path.exists() for pair in pairs(path)]
COMPARED = [pair for pair in PAIRS if not pair.command.startswith(tuple(NOT_RUN))]


@cache
def printed(command: str) -> str:
    """Everything a command prints, run where there is nothing but the configs."""
    pair = Pair(command=recipe(command), output=PAIRS[0].output)
    words = pair.words
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    assert words[0] == "python", command
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=place(), env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.stdout


def recipe(command: str) -> str:
    """`make demo` as the command that the Makefile has for it; others as they are."""
    if not command.startswith("make "):
        return command
    text = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{command.split()[1]}:.*\n\t(.*)$", text, re.MULTILINE)
    assert found, command
    variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*)$", text, re.MULTILINE))
    line = found[1].replace("$(BIN)/python", "python")
    while wanted := re.search(r"\$\((\w+)\)", line):
        line = line.replace(wanted[0], variables[wanted[1]])
    return line


@cache
def place() -> Path:
    """An empty folder in which `config/` is the repository's."""
    folder = Path(tempfile.mkdtemp(prefix="documents"))
    (folder / "config").symlink_to(ROOT / "config")
    return folder


@pytest.mark.golden
@pytest.mark.parametrize("pair", [pytest.param(p, id=p.output.place, marks=marked(p)) for p in COMPARED])
def test_what_is_pasted_is_printed(pair: Pair):
    if pair.command.startswith(COMPILED):
        pytest.importorskip("libtpu")
    if pair.command.startswith(COMPILED_FOR_GPUS) and cuda_plugin() is None:
        pytest.skip("JAX's CUDA plugin is not installed (the `plan-gpu` extra)")
    if pair.command == "make demo" and sys.version_info[:2] != (3, 11):
        pytest.skip("the text is that of Python 3.11")
    output = printed(pair.command)
    lost = missing(pair.output.text, output)
    errors = re.findall(r"^error: .*$", output, re.MULTILINE)
    if lost and any(ABSENT.search(error) for error in errors):
        pytest.skip(f"the model cannot be had: {errors[0]}")
    if lost and updating():
        text = pair.output.document.read_text(encoding="utf-8")
        assert text.count(pair.output.text) == 1, f"{pair.output.place}: which of the blocks of this text?"
        new = text.replace(pair.output.text, renewed(pair.output.text, output))
        pair.output.document.write_text(new, encoding="utf-8")
        return
    said = "\n".join(lost)
    assert not lost, (
        f"{pair.output.place} shows what `{pair.command}` does not print (`make golden` writes it anew):\n{said}\n\n"
        f"It prints:\n{output}"
    )


def test_the_plan_of_the_demonstration_is_todays():
    """What `make demo` prints before it reads a weight, which takes seconds."""
    (pair,) = [pair for pair in PAIRS if pair.command == "make demo"]
    config = load(EvalLmConfig, ["--config_path", str(ROOT / "config/eval/demo.yaml")])
    try:
        plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=8))
    except RunRefused as error:
        pytest.skip(f"the model cannot be had: {error}")
    pasted = pair.output.text[pair.output.text.index("       ok  data:") :].partition("\nprograms: ")[0]
    assert missing(pasted, plan.report()) == []


def test_there_are_pairs_of_every_cost():
    compiled = [pair for pair in PAIRS if pair.command.startswith(COMPILED)]
    slow = [pair for pair in PAIRS if pair.command in SLOW]
    assert slow and len(compiled) >= 3 and len(COMPARED) - len(compiled) - len(slow) >= 4
    # A reason for a command that no document shows any more is no reason.
    assert all(any(pair.command.startswith(start) for pair in PAIRS) for start in (*NOT_RUN, *SLOW, *COMPILED))


BLOCKS = [block for path in DOCUMENTS if path.exists() for block in blocks(path)]


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in BLOCKS if b.commands])
def test_a_shown_command_names_what_is_there(block: Block):
    for command in block.commands:
        for module in re.findall(r"-m (levanter[\w.]*)", command):
            path = ROOT / "src" / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for target in re.findall(r"^make ([\w-]+)", command):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        for config in re.findall(r"config/[\w./-]+\.yaml", command):
            # `my_run.yaml` stands for the reader's own.
            assert (ROOT / config).exists() or Path(config).name.startswith("my_"), config


def test_configurations_that_documents_show_are_the_files():
    """A YAML block below a line that ends in a file's name and a colon has the file's content."""
    found = 0
    for block in (b for b in BLOCKS if b.language == "yaml"):
        above = "\n".join(block.document.read_text(encoding="utf-8").splitlines()[: block.line - 1]).rstrip()
        if named := re.search(r"configuration is `(config/[\w./-]+\.yaml)`:$", above):
            found += 1
            assert yaml.safe_load(block.text) == yaml.safe_load((ROOT / named[1]).read_text()), block.place
    assert found


class TestComparing:
    """How pasted output is compared."""

    PRINTED = "a 1\nb 2.5 s\nc 3 GiB\nd logs/1234abcd/x\ne 10 tokens/s\nscore 1.42 s (modelled)\n"

    @pytest.mark.parametrize(
        "pasted",
        [
            "a 1\nb 99.1 s",
            "…\nc 3 GiB\nd logs/00000000/x\n…\nscore 1.42 s (modelled)",
            "a …\n…\nc … GiB",
            "e 7,000 tokens/s",
        ],
    )
    def test_what_is_the_machines_may_differ(self, pasted):
        assert missing(pasted, self.PRINTED) == []

    @pytest.mark.parametrize(
        ("pasted", "lost"),
        [
            ("a 1\nc 3 GiB", ["a 1", "c 3 GiB"]),  # Lines between are not left out in silence.
            ("c 4 GiB", ["c 4 GiB"]),
            ("c 3 GiB\n…\na 1", ["a 1"]),  # Order counts.
            ("score 1.43 s (modelled)", ["score 1.43 s (modelled)"]),
            ("blockwise: 8192 keys", ["blockwise: 8192 keys"]),
        ],
    )
    def test_everything_else_may_not(self, pasted, lost):
        assert missing(pasted, self.PRINTED) == lost

    def test_what_is_stale_is_written_anew_and_the_rest_is_left(self):
        pasted = "a 1\nb 9.9 s\n…\nc 4 GiB\nd logs/00000000/x\n…\nscore 1.50 s (modelled)\n…\n"
        renew = renewed(pasted, self.PRINTED)
        assert renew == "a 1\nb 9.9 s\n…\nc 3 GiB\nd logs/1234abcd/x\n…\nscore 1.42 s (modelled)\n…\n"
        assert missing(renew, self.PRINTED) == []
        with pytest.raises(AssertionError, match="nothing like"):
            renewed("something else altogether\n", self.PRINTED)

    def test_numbers_with_units_of_memory_stay(self):
        assert same_everywhere("76.81 MiB in 1.27 s (0.08 GB/s)") == "76.81 MiB in TIME (RATE)"
