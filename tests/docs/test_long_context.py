"""`docs/long-context.md`: its configurations are read, its commands are commands, its tables are complete."""

import json
import re
import shlex
from pathlib import Path

from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.train.config import TrainLmConfig
from levanter.config import load_written, parse_text
from levanter.config.schema import config_fields
from levanter.eval.needles.tasks import TASKS
from levanter.layers.rotary import YarnRotaryConfig
from levanter.models import LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "long-context.md").read_text(encoding="utf-8")
STAGES, NEEDLES = PAGE.split("\n## Extending the context with YaRN\n")[1].split(
    "\n## Needle-in-a-haystack evaluation\n"
)


def table(text: str, head: str) -> list[list[str]]:
    """The names of each line of a table."""
    (found,) = re.findall(rf"\n\| {head} \|.*?\n\n", text, re.S)
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in found.strip().splitlines()[2:]]


def test_every_task_and_every_key_is_there():
    assert table(NEEDLES, "task") == [[name] for name in TASKS]
    for task in TASKS.values():
        assert f"| `{task.name}` | {task.summary} |" in NEEDLES
    keys = {key for names in table(NEEDLES, "key") for key in names}
    assert keys | {"trainer", "plan"} == set(config_fields(EvalNeedlesConfig))


def test_configurations_are_read():
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S):
        config = parse_text(TrainLmConfig, block)
        if config.initialize_from_hf:
            assert isinstance(config.model, LlamaConfig) and isinstance(config.model.rope, YarnRotaryConfig)
            assert config.model.max_seq_len == 4 * config.model.rope.original_max_position_embeddings


def test_commands_are_commands():
    (command,) = re.findall(r"^python -m levanter\.main\.eval_needles (.*)$", NEEDLES, re.M)
    config = load_written(EvalNeedlesConfig, shlex.split(command)).config
    assert config.lengths == [4096, 8192] and config.tasks == ["niah_single_1", "vt"]


def test_memory_is_what_was_compiled():
    """Of the rows whose figures are kept; the others were compiled by hand."""
    kept = {
        ("performance.md", "65,536 × 8"): "llama_0.78b_64k_context8_ring",
        ("performance.md", "262,144 × 2"): "llama_0.78b_256k",
        ("performance.md", "262,144 × 8"): "llama3.1_8b_256k_v5p-128",
    }
    for (page, row), name in kept.items():
        facts = json.loads((ROOT / "tests/golden/compiled" / f"{name}.json").read_text(encoding="utf-8"))
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        peak = facts["programs"]["train_step"]["peak"]
        assert re.search(rf"^\| {row} \| {peak / 2**30:.2f} GiB \|", text, re.M), (page, row, peak)
