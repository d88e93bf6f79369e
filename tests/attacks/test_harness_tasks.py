"""Task files of the harness that are code: it may not end the run, leave its sandbox, or report nothing."""

import json
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import make_inputs

pytest.importorskip("lm_eval")

BAD = 2


def tasks(text: str = "", module: str = ""):
    """Words for a task file with these lines more, whose functions are in `code.py`."""

    def prepared(folder: Path) -> list[str]:
        made, there = make_inputs(folder), folder / "tasks"
        there.mkdir()
        (there / "rows.jsonl").write_text("".join(json.dumps({"q": f"q {n}", "a": "b"}) + "\n" for n in range(3)))
        keys = {
            "task": "attack",
            "dataset_path": "json",
            "dataset_kwargs": "{data_files: {test: " + str(there / "rows.jsonl") + "}}",
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": '"{{q}}"',
            "doc_to_target": "0",
            "doc_to_choice": "[b, c]",
        }
        # A line of the attack replaces the key of the same name.
        lines = [f"{key}: {value}" for key, value in keys.items() if not text.startswith(f"{key}:")]
        (there / "attack.yaml").write_text("\n".join([*lines, text, ""]))
        (there / "code.py").write_text(module)
        document = {
            "hf_checkpoint": str(made.model),
            "include_path": str(there),
            "eval_harness": {"task_spec": ["attack"]},
            "output_path": str(folder / "out"),
            "trainer": {"mp": "f32", "log_dir": str(folder / "logs"), "per_device_eval_parallelism": 1},
        }
        (folder / "run.yaml").write_text(json.dumps(document))
        return ["--config_path", str(folder / "run.yaml")]

    return prepared


def ends(call: str, key: str = "doc_to_text"):
    return tasks(f"{key}: !function code.run", f"import os, sys\ndef run(*_):\n    {call}\n")


ENDS = "a task's code ends the process"
ATTACKS = [
    Attack(name="sys-exit", command="eval_harness", words=ends("sys.exit(0)"), code=BAD,
           says=(ENDS, "code.py, line 3")),
    Attack(name="os-exit", command="eval_harness", words=ends("os._exit(0)"), code=BAD,
           says=(ENDS, "code.py, line 3")),
    Attack(name="exit-in-results", command="eval_harness", words=ends("sys.exit(0)", "process_results"), code=BAD,
           says=(ENDS,)),
    Attack(name="no-such-metric", command="eval_harness", code=BAD, words=tasks("metric_list: [{metric: acuracy}]"),
           says=("acuracy",)),
    Attack(name="metric-of-another-kind", command="eval_harness", code=BAD,
           words=tasks("metric_list: [{metric: word_perplexity}]"), says=("word_perplexity",)),
    Attack(name="template-leaves-the-sandbox", command="eval_harness", code=BAD,
           words=tasks("doc_to_text: \"{{ ''.__class__.__mro__[1].__subclasses__() }}\""), says=("__class__",)),
    Attack(name="template-without-end", command="eval_harness", code=BAD,
           words=tasks('doc_to_text: "{% for i in range(99999999) %}{{ q * 9999 }}{% endfor %}"'), says=("attack",)),
    Attack(name="unsafe-code", command="eval_harness", code=BAD, words=tasks("unsafe_code: true"),
           says=("attack: runs code that a model wrote", "confirm_run_unsafe_code: true")),
]  # fmt: skip
QUICK = ("os-exit", "no-such-metric", "template-leaves-the-sandbox", "unsafe-code")


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=QUICK))
def test_code_of_a_task(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
    assert not list(tmp_path.glob("out/**/results*.json"))
