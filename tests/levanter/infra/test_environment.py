import stat

import pytest

from levanter.infra.console import Console
from levanter.infra.environment import collect
from levanter.infra.errors import UsageError

pytestmark = pytest.mark.quick


def test_later_ones_win_and_known_names_come_along(tmp_path):
    file = tmp_path / "run.env"
    file.write_text("# a comment\nexport A='in file'\nB=two words\n\nHF_TOKEN=\"hf_fromfile\"\n")
    here = {"WANDB_API_KEY": "k" * 40, "HF_TOKEN": "hf_fromhere", "C": "from here", "UNASKED": "stays"}
    found = collect([["A=on line"], ["C"], ["D", "4"], ["E="]], [str(file)], here=here, defaults={"B": "b", "F": "f"})
    assert dict(found.values) == {
        "WANDB_API_KEY": "k" * 40, "HF_TOKEN": "hf_fromfile", "A": "on line", "B": "two words", "C": "from here",
        "D": "4", "E": "", "F": "f",
    }  # fmt: skip
    assert found.forwarded == ("WANDB_API_KEY",)
    assert set(found.secrets()) == {"k" * 40, "hf_fromfile"}
    assert "hf_fromfile" not in repr(found)


def test_everything_that_is_wrong_is_said_without_a_value(tmp_path):
    file = tmp_path / "bad.env"
    file.write_text("A=1\nno equals sign secretvalue\n")
    with pytest.raises(UsageError) as error:
        collect([["MISSING"], ["A=1", "2"], ["9X=hiddenvalue"], ["L", "one\ntwo"]], [str(file), "none.env"], here={})
    message = str(error.value)
    for part in ("-e MISSING", "-e A", "'9X'", "L: its value has a line break", f"{file}:2", "none.env"):
        assert part in message
    assert "hiddenvalue" not in message and "secretvalue" not in message


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "environment"
    path.write_text("old, readable by all")
    path.chmod(0o644)
    collect([["B", "x=y z"], ["A", "'$(touch no)'"]], here={}).write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "A='$(touch no)'\nB=x=y z\n"


def test_secrets_are_hidden_in_every_line(capsys):
    console = Console(["hf_abcdef", "hf_abcdefghi", "tiny"])
    console.say("token hf_abcdefghi and hf_abcdef")
    console.show("one hf_abcdef\ntwo tiny", prefix="[3] ")
    shown = capsys.readouterr()
    assert shown.err == "launch: token *** and ***\n"
    assert shown.out == "[3] one ***\n[3] two tiny\n"
