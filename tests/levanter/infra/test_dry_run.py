"""What a dry run prints, as reviewed texts; it calls nothing."""

import os
import platform
import re
import subprocess
import sys

import jax
import pytest
from helpers.golden import assert_golden

from levanter.infra.host_scripts import Remote, like_here
from levanter.infra.launch import main

# The flags of each command in Google's reference (Cloud SDK 528, release track GA), as far as a launcher wants them.
DOCUMENTED = {
    "tpu-vm create": "zone project accelerator-type type topology version spot preemptible reserved network subnetwork "
    "service-account internal-ips labels metadata",
    "tpu-vm describe": "zone project format",
    "tpu-vm delete": "zone project quiet",
    "tpu-vm list": "zone project",
    "tpu-vm ssh": "zone project worker command tunnel-through-iap quiet",
    "tpu-vm scp": "zone project worker recurse tunnel-through-iap quiet",
    "queued-resources create": "zone project node-id node-count node-prefix accelerator-type type topology "
    "runtime-version spot reserved valid-until-duration network subnetwork service-account internal-ips labels",
    "queued-resources describe": "zone project format",
    "queued-resources delete": "zone project force quiet",
    "queued-resources list": "zone project",
}
EVAL = ["python", "-m", "levanter.main.eval_lm", "--config_path", "config/eval/llama3.1_405b_v4-256.yaml"]
TRAIN = ["python", "-m", "levanter.main.train_lm", "--config_path", "config/train/llama3_8b_v6e-128.yaml"]
CASES = {
    "v4-256_on_demand": ["--tpu_type", "v4-256", "--zone", "us-central2-b", "--", *EVAL],
    "v6e-64_spot_queued": ["--tpu_type", "v6e-64", "--zone", "us-east5-b", "--project", "p", "--spot", "--queued",
                           "--valid_until", "6h", "--autodelete", "-e", "HF_TOKEN", "--", *TRAIN],
    "two_slices": ["--tpu_type", "2xv5p-128", "--zone", "us-east5-a", "--capacity_type", "reserved",
                   "--image", "us-docker.pkg.dev/p/levanter/run:1", "--", *TRAIN],
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_secret_is_set(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3ts3cr3t")


@pytest.fixture(autouse=True)
def one_python_and_jax(monkeypatch):
    monkeypatch.setattr("levanter.infra.launch.like_here", lambda: ("3.12", ("jax==0.10.2",)))


def test_hosts_get_the_python_and_the_jax_that_planned():
    python, pins = like_here()
    assert python == ".".join(platform.python_version_tuple()[:2])
    assert pins == (f"jax=={jax.__version__}",)
    script = Remote(run="r", command=("x",), install="source[tpu]", python=python, pins=pins).setup_script()
    assert f"uv venv --quiet --python {python} venv" in script
    assert f"-e 'source[tpu]' jax=={jax.__version__}\n" in script


def printed(capsys, *words: str) -> str:
    assert main(["--dry_run", "--tpu_name", "books", "--run_id", "r1", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


@pytest.mark.golden
@pytest.mark.parametrize("name", CASES)
def test_reviewed_commands(name, capsys):
    text = printed(capsys, *CASES[name])
    assert "hf_s3cr3t" not in text
    assert_golden(f"launch/{name}.txt", text)


@pytest.mark.parametrize(
    "words", [*CASES.values(), ["--tpu_type", "v4:4x4x16", "--zone", "z", "--internal_ips", *EVAL]]
)
def test_only_flags_that_gcloud_documents(words, capsys):
    words = [*words] if "--" in words else [*words[:5], "--", *EVAL]
    commands = printed(capsys, *words).replace("\\\n", " ").splitlines()
    commands = [line for line in commands if line.startswith("gcloud")]
    assert commands
    for line in commands:
        group = re.match(r"gcloud compute tpus (\S+ \S+)", line)
        assert group, line
        used = re.findall(r" --([a-z-]+)", line.split(" --command=")[0])
        assert set(used) <= set(DOCUMENTED[group[1]].split()), line


def test_a_topology_of_ones_own(capsys):
    text = printed(capsys, "--tpu_type", "v4:4x4x16", "--zone", "z", "--", *EVAL)
    assert "--type=v4 \\\n    --topology=4x4x16" in text and "--accelerator-type" not in text


def test_the_scripts_are_sound_for_bash(capsys, tmp_path):
    for words in CASES.values():
        text = printed(capsys, *words)
        for name in ("setup.sh", "worker.sh"):
            script = re.search(rf"# {name}\n((?:(?:    .*)?\n)+)", text)
            assert script
            (tmp_path / name).write_text(re.sub("(?m)^    ", "", script[1]))
            subprocess.run(["bash", "-n", tmp_path / name], check=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tpu_type", "v4-250", "--zone", "z"], ["does not come in size 250", "v4-256"]),
        (["--tpu_typ", "v4-256"], ["unknown flag --tpu_typ; did you mean `--tpu_type`"]),
        ([], ["--tpu_type is missing", "--zone is missing"]),
        (["--tpu_type", "tpu7x-16", "--zone", "z"], ["Kubernetes Engine only"]),
        (["--tpu_type", "h100x8", "--zone", "z"], ["slurm"]),
        (["--tpu_type", "2xv5p-128", "--zone", "z", "--queued=false"], ["several slices"]),
        (["--tpu_type", "2xv5p-128", "--zone", "z", "--node_count", "3"], ["means 2 slices"]),
        (["--tpu_type", "v4-8", "--zone", "z", "--capacity_type", "cheap"], ["on-demand, spot, preemptible"]),
        (["--tpu_type", "v4-8", "--zone", "z", "--plan_first=maybe"], ["neither true nor false"]),
    ],
)
def test_bad_command_lines(words, says, capsys):
    assert main(["--tpu_name", "books", *words, "--", *EVAL]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in says), error


def test_a_misspelt_command(capsys):
    assert main(["locl", "--processes", "2", "--", "true"]) == 2
    assert "unknown command 'locl'; did you mean `local`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # How upstream's launch script spells them.
        (["--tpu_type", "v5p-128", "--node_count", "2"], ["--tpu", "2xv5p-128"]),
        (["--tpu_type", "v4-32", "--preemptible", "--foreground"], ["--tpu", "v4-32", "--capacity", "preemptible"]),
        (["--tpu-type", "v4-32", "--capacity_type", "spot", "-e", "A", "1"], ["--tpu", "v4-32", "--spot", "-e", "A=1"]),
    ],
)
def test_spellings(theirs, ours, capsys):
    tail = ["--zone", "z", "--", *EVAL]
    assert printed(capsys, *theirs, *tail) == printed(capsys, *ours, *tail)


def test_defaults_from_a_settings_file(capsys, tmp_path, monkeypatch):
    (tmp_path / ".levanter.yaml").write_text("zone: us-central2-b\ncapacity: spot\nenv: {A: one}\npartition: big\n")
    monkeypatch.chdir(tmp_path)
    text = printed(capsys, "--tpu_type", "v4-32", "--", *EVAL)
    assert "--zone=us-central2-b" in text and "--spot" in text and "mode 600: A, " in text
    assert "--zone=elsewhere" in printed(capsys, "--tpu_type", "v4-32", "--zone", "elsewhere", "--", *EVAL)


@pytest.mark.parametrize("command", ["", "tpu", "create", "exec", "logs", "list", "delete", "local", "slurm"])
def test_help(command, capsys):
    assert main([*([command] if command else []), "--help"]) == 0
    assert "usage" in capsys.readouterr().out


def test_imports_no_jax_and_needs_none():
    """Every module of the room, in an interpreter in which importing JAX fails."""
    script = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "haliax", "equinox", "haliax_ext", "ray", "numpy"):
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Refuse())
import levanter.infra
names = [m.name for m in pkgutil.iter_modules(levanter.infra.__path__, "levanter.infra.")]
for name in names:
    importlib.import_module(name)
print(len(names))
from levanter.infra.launch import main
from levanter.infra.host_scripts import Remote, like_here
sys.exit(main(sys.argv[1:]))
"""
    words = ["--dry_run", "--tpu_name", "a", *CASES["v4-256_on_demand"]]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 20 and "gcloud compute tpus tpu-vm create" in done.stdout
