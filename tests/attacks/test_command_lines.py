"""Command lines and documents that are nonsense: one clear error each, and exit code 2."""

from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table


def document(text: str):
    """Words that name a document of this text."""

    def prepared(folder):
        path = folder / "document.yaml"
        path.write_text(text)
        return ["--config_path", str(path)]

    return prepared


BAD = 2
CONFIG = Path(__file__).parents[2] / "config"
ATTACKS = [
    Attack(name="no-such-file", command="eval_lm", words=["--config_path", "not/there.yaml"], code=BAD,
           says=("not/there.yaml", "nor is there a folder not")),
    Attack(name="misspelt-file", command="train_lm", words=["--config_path", str(CONFIG / "train" / "nanno.yaml")],
           code=BAD, says=("nanno.yaml", "did you mean", "nano.yaml")),
    Attack(name="misspelt-key", command="eval_lm", words=document("trainer:\n  mash: {}\n"), code=BAD,
           says=("mash", "mesh")),
    Attack(name="misspelt-flag", command="train_lm", words=["--trainer.num_train_step", "3"], code=BAD,
           says=("num_train_step", "num_train_steps")),
    Attack(name="not-yaml", command="eval_lm", words=document("a: [1, 2\nb: }"), code=BAD, says=("document.yaml",)),
    Attack(name="a-list", command="train_lm", words=document("- 1\n- 2\n"), code=BAD, says=("document.yaml",)),
    Attack(name="empty", command="eval_lm", words=document(""), code=BAD),
    Attack(name="binary", command="eval_careless_lm", words=document("\x00\x01\x02"), code=BAD,
           says=("document.yaml",)),
    Attack(name="a-word-for-a-number", command="train_lm", words=["--trainer.num_train_steps", "many"], code=BAD,
           says=("num_train_steps", "many")),
    Attack(name="plan-without-target", command="plan", words=["eval_lm"], code=BAD, says=("--target",)),
    Attack(name="plan-of-nothing", command="plan", words=["evil_lm", "--target", "v4-8"], code=BAD,
           says=("evil_lm", "eval_lm")),
    Attack(name="plan-option", command="plan", words=["train_lm", "--keep_text", "here", "--target", "v4-8"], code=BAD,
           says=("keep_text: unknown key", "options of plan", "--keep_hlo")),
    Attack(name="plan-switch", command="plan", words=["train_lm", "--no_compil", "--target", "v4-8"], code=BAD,
           says=("--no_compil needs a value", "options of plan", "did you mean `no_compile`?")),
    Attack(name="plan-for-no-pod", command="plan", words=["eval_lm", "--target", "v4-9"], code=BAD, says=("v4-9",)),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=6))
def test_a_command_line_of_nonsense(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
