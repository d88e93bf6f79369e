"""Shell completion: what words may become, and the script in a real shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from levanter.commands.cli.completion import SHELLS, completions, main
from levanter.main.__main__ import commands

ROOT = Path(__file__).parents[3]
COMMANDS = sorted(commands())


def test_commands_and_entry_points_of_plan():
    assert completions(["train"], COMMANDS) == ["train_dpo", "train_lm", "train_tokenizer"]
    assert completions(["eval-l"], COMMANDS) == ["eval_lm"]
    assert completions([], COMMANDS) == completions([""], COMMANDS) == COMMANDS
    assert completions(["plan", "eval_l"], COMMANDS) == ["eval_lm"]


def test_keys_down_to_the_next_dot():
    assert completions(["eval_lm", "--max_ev"], COMMANDS) == ["--max_eval_length"]
    # Of four blocks and keys with these letters, the outermost part only.
    mesh = completions(["eval_lm", "--trainer.mesh.a"], COMMANDS)
    assert {"--trainer.mesh.axes", "--trainer.mesh.allow_idle_axes"} <= set(mesh) and all(
        k.count(".") == 2 for k in mesh
    )
    assert "--trainer." in completions(["eval_lm", "--t"], COMMANDS)
    assert not [key for key in completions(["eval_lm", "--"], COMMANDS) if "." in key.rstrip(".")]
    assert completions(["plan", "eval_lm", "--hf"], COMMANDS) == ["--hf_checkpoint"]
    assert "--help_all" in completions(["serve", "--help"], COMMANDS)


def test_values_that_can_be_listed():
    assert completions(["eval_lm", "--quantize", ""], COMMANDS) == ["int8"]
    assert "true" in completions(["eval_lm", "--eval_on_train", "t"], COMMANDS)
    families = completions(["eval_lm", "--model.type", ""], COMMANDS)
    # Families whose documents are read and then refused are not offered.
    assert "llama" in families and "whisper" not in families
    # Files are the shell's business.
    assert completions(["eval_lm", "--config_path", ""], COMMANDS) == []
    assert completions(["migrate", "--"], COMMANDS) == []


def test_keys_of_the_chosen_type():
    chosen = completions(["eval_lm", "--model.type", "gemma2", "--model.attn_l"], COMMANDS)
    assert chosen == ["--model.attn_logit_softcapping"]
    assert completions(["eval_lm", "--model.attn_l"], COMMANDS) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_completes_in_a_shell(shell, tmp_path, capsys):
    assert main(["--completion", shell], COMMANDS) == 0
    script = capsys.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "levanter"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m levanter "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(script)
    typed = {
        "bash": "source script; COMP_WORDS=(levanter eval_l); COMP_CWORD=1; _levanter; echo ${COMPREPLY[@]}",
        "zsh": "source ./script 2>/dev/null; whence -f _levanter | head -1",
    }[shell]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([shell, "-c", typed], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.stdout.strip() == {"bash": "eval_lm", "zsh": "_levanter () {"}[shell], done.stderr


def test_another_shell_is_refused(capsys):
    assert main(["--completion", "fish"], COMMANDS) == 2
    assert "expected bash or zsh" in capsys.readouterr().err
