"""Streams that are not there, that nobody reads, or that lack signs; small programs show what a process sees."""

import os
import subprocess
import sys

import pytest

from levanter.io import prepare_streams, printing_may_fail

PREPARED = "import sys\nfrom levanter.io.stdout import prepare_streams\nprepare_streams()\n"


def run(program: str, *, shell: str = "", **environment: str) -> tuple[int, bytes, bytes]:
    """A program's exit code and what it printed; `shell` is what a shell does with its streams."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, program],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
        timeout=250,
    )
    return done.returncode, done.stdout, done.stderr


def test_signs_that_an_encoding_lacks():
    program = PREPARED + "print('2 × 3 → 6, ≥ 5 – é² ┃█ 中 \\udcff'); print('…', file=sys.stderr)\n"
    code, out, err = run(program, PYTHONIOENCODING="ascii")
    assert (code, out, err) == (0, b"2 x 3 -> 6, >= 5 - e2 |# \\u4e2d \\udcff\n", b"...\n")
    # UTF-8 lacks one of them: the name of a file that is not UTF-8.
    code, out, _ = run(program, PYTHONIOENCODING="utf-8")
    assert (code, out) == (0, "2 × 3 → 6, ≥ 5 – é² ┃█ 中 \\udcff\n".encode())


def test_a_closed_stream_is_nowhere_and_no_file_gets_its_number(tmp_path):
    program = PREPARED + (
        "import os\n"
        f"precious = open({str(tmp_path / 'precious')!r}, 'w')\n"
        "os.write(2, b'a C++ library says something')\n"
        "print('fine', file=sys.stderr); print('done')\n"
    )
    assert run(program, shell="2>&-") == (0, b"done\n", b"")
    assert (tmp_path / "precious").read_bytes() == b""
    assert run(program.replace("os.write(2", "os.write(1"), shell=">&-") == (0, b"", b"fine\n")
    assert (tmp_path / "precious").read_bytes() == b""
    assert run(program, shell="<&- >&- 2>&-")[0] == 0


@pytest.mark.parametrize("full", [False, True], ids=["no reader", "no room"])
def test_work_goes_on_without_its_output(full):
    program = (
        "import sys, time\n"
        "from levanter.io import printing_may_fail, setup_logging\n"
        "setup_logging()\n"
        "with printing_may_fail():\n"
        "    for _ in range(3):\n"
        "        print('x' * 100_000, flush=True)\n"
        "    print('saved', file=sys.stderr)\n"
    )
    code, _, err = run(program, shell=">/dev/full" if full else "| true")
    said = err.decode()
    assert "saved" in said and said.count("standard output accepts no more output") == 1
    assert code == 0


def test_streams_are_put_back(capsys):
    prepare_streams()
    before = sys.stdout, sys.stderr
    with printing_may_fail():
        sys.stdout.write("seen\n")
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "seen\n"
