"""Logs: set up once, by whoever runs the program, without side effects at import."""

import logging
import subprocess
import sys

import pytest

from levanter.io.logs import HANDLER_NAME, setup_logging


@pytest.fixture
def root():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


def ours(root):
    return [handler for handler in root.handlers if handler.get_name() == HANDLER_NAME]


def test_setting_up_twice_gives_one_handler(root, capsys):
    others = [handler for handler in root.handlers if handler.get_name() != HANDLER_NAME]
    setup_logging()
    setup_logging("DEBUG")
    assert len(ours(root)) == 1 and [h for h in root.handlers if h in others] == others
    logging.getLogger("levanter.test").info("hello")
    assert capsys.readouterr().err.count("levanter.test: hello") == 1


def test_processes_beyond_the_first_show_warnings_only(root, capsys):
    setup_logging(process_index=3, process_count=4)
    logging.getLogger("levanter.test").info("quiet")
    logging.getLogger("levanter.test").warning("loud")
    shown = capsys.readouterr().err
    assert "quiet" not in shown and "[3] W levanter.test: loud" in shown


def test_importing_has_no_side_effects_and_no_jax():
    program = (
        "import logging, sys\n"
        "import levanter.io, levanter.tracker\n"
        "assert not logging.getLogger().handlers\n"
        "loaded = {'jax', 'wandb', 'tensorboardX', 'trackio', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
