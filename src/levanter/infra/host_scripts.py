"""Scripts that run on the hosts, copied there in one folder with the environment.

    .levanter/RUN/environment     NAME=value lines, mode 600
    .levanter/RUN/setup.sh        once per host: Python, the package, or the image
    .levanter/RUN/worker.sh       starts an attempt once, and follows its log; called again it only follows

The command runs in a session of its own on the host, so it survives a dropped connection: `worker.sh` is called again
and continues to show the log. Its exit code is the command's.
"""

import importlib.metadata
import shlex
import sys
from dataclasses import dataclass
from typing import Literal

FOLDER = ".levanter"
ENVIRONMENT = "environment"
SOURCE = "source.tar.gz"

Setup = Literal["pip", "image", "none"]


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The command of each host, and how the host is set up for it.

    Attributes:
        run: the id of the run, and the name of its folder.
        command: its arguments.
        setup: `pip`: a virtual environment with the package; `image`: a container; `none`: the host as it is.
        install: what pip installs: `source[tpu,remote]` for the copied tree, or any requirement.
        image: the container image.
        python: the Python version of the virtual environment.
        pins: further pinned requirements.
    """

    run: str
    command: tuple[str, ...]
    setup: Setup = "pip"
    install: str = ""
    image: str = ""
    python: str = "3.12"
    pins: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The run's folder on a host, relative to the home directory."""
        return f"{FOLDER}/{self.run}"

    def setup_call(self) -> str:
        """The shell command that prepares a host."""
        return f"bash {self.folder}/setup.sh"

    def worker_call(self, attempt: int, label: str = "", *, verb: str = "run") -> str:
        """Starts attempt `attempt` unless it is already running, and follows it (`run`); or only one of these."""
        return shlex.join(["bash", f"{self.folder}/worker.sh", str(attempt), verb, *([label] if label else [])])

    @staticmethod
    def newest_call() -> str:
        """Follows the newest run on the hosts."""
        return f'bash "$(ls -t {FOLDER}/*/worker.sh | head -n1)" latest follow'

    def setup_script(self) -> str:
        """`setup.sh`: safe to run again."""
        head = _SETUP_HEAD
        if self.setup == "image":
            return head + _SETUP_IMAGE.format(
                registry=shlex.quote(self.image.split("/")[0]), image=shlex.quote(self.image)
            )
        if self.setup == "none":
            return head
        # The copied tree is installed in place, so that files beside the package (configs) have their paths.
        target = f"-e {shlex.quote(self.install)}" if self.install.startswith("source") else shlex.quote(self.install)
        requirements = " ".join([target, *map(shlex.quote, self.pins)])
        return head + _SETUP_PIP.format(python=self.python, requirements=requirements)

    def worker_script(self) -> str:
        """`worker.sh`."""
        words = shlex.join(self.command)
        if self.setup == "image":
            body = _RUN_IMAGE.format(name=f"levanter-{self.run}", image=shlex.quote(self.image), command=words)
            return _WORKER.format(body=body)
        return _WORKER.format(body=_RUN_HERE.format(command=words))


def like_here() -> tuple[str, tuple[str, ...]]:
    """This Python's version, and pins for the JAX installed here: what was planned is what is compiled there."""
    try:
        pins: tuple[str, ...] = (f"jax=={importlib.metadata.version('jax')}",)
    except importlib.metadata.PackageNotFoundError:
        pins = ()
    return f"{sys.version_info.major}.{sys.version_info.minor}", pins


_SETUP_HEAD = """\
#!/usr/bin/env bash
# Prepares this host for one run. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")"
chmod 700 . && chmod 600 environment
# Leftover processes of an earlier attempt or run would hold the chips.
for old in ../*/attempt-*/pid; do
    [ -f "$old" ] || continue
    kill -KILL -- "-$(cat "$old")" 2>/dev/null || true
    rm -f "$old"
done
rm -rf attempt-*
if [ -f source.tar.gz ]; then
    mkdir -p source
    tar -xzf source.tar.gz -C source
fi
"""

_SETUP_PIP = """\
# The image's own Python may be too old for the package; uv installs one.
export PATH="$HOME/.local/bin:$PATH"
command -v uv >/dev/null || python3 -m pip install --quiet --user uv
[ -x venv/bin/python ] || uv venv --quiet --python {python} venv
uv pip install --quiet --python venv/bin/python {requirements}
"""

# A container of an earlier run would hold the chips, so all of ours are removed first.
_SETUP_IMAGE = """\
sudo docker ps --quiet --filter name=levanter- | xargs --no-run-if-empty sudo docker rm --force
case {registry} in
    *-docker.pkg.dev | gcr.io | *.gcr.io) sudo gcloud auth configure-docker {registry} --quiet ;;
esac
sudo docker pull --quiet {image}
"""

# `export "$line"` takes the line as it is: nothing in a value is evaluated by the shell.
_RUN_HERE = """\
    while IFS= read -r line; do export "$line"; done <"$home/environment"
    export PATH="$home/venv/bin:$HOME/.local/bin:$PATH"
    [ ! -d "$home/source" ] || cd "$home/source"
    {command}
"""

_RUN_IMAGE = """\
    sudo docker run --rm --privileged --net=host --shm-size=32gb --name {name} \\
        --env-file "$home/environment" -v /tmp:/tmp {image} \\
        {command}
"""

# Starting is made atomic by `mkdir`: of two calls one creates the folder of the attempt. Files
# are written under another name and renamed, so that `follow` never reads half a pid or exit
# code. Braces are doubled for `format`.
_WORKER = """\
#!/usr/bin/env bash
# worker.sh ATTEMPT|latest run|start|follow [LABEL]: starts an attempt once on this host, and follows its log.
set -u
cd "$(dirname "$0")" || exit 1
home=$PWD attempt=attempt-$1 verb=$2 label=${{3:-}}
[ "$1" != latest ] || attempt=$(ls -d attempt-* 2>/dev/null | sort -t- -k2 -n | tail -n1)
host=$(hostname)
case $host in *-w-*) host=${{host##*-w-}} ;; esac

main() {{
{body}}}

start() {{
    mkdir "$attempt" 2>/dev/null || return 0
    export -f main
    export home
    setsid bash -c 'main; echo $? >"$0/code.new"; mv "$0/code.new" "$0/code"' "$home/$attempt" \\
        >"$attempt/log" 2>&1 </dev/null &
    echo $! >"$attempt/pid.new"
    mv "$attempt/pid.new" "$attempt/pid"
}}

follow() {{
    for _ in $(seq 100); do
        [ -f "$attempt/pid" ] && break
        sleep 0.1
    done
    from=+1
    # Called again, it resumes where the connection was lost, with a few lines of context.
    [ ! -f "$attempt/seen" ] || from=20
    touch "$attempt/seen"
    pid=$(cat "$attempt/pid" 2>/dev/null) || exit 127
    tail --pid="$pid" --lines="$from" --sleep-interval=0.5 --follow=name "$attempt/log" 2>/dev/null |
        sed --unbuffered "s|^|[$label$host] |"
    # Without an exit code, the shell that writes it was killed along with the command.
    exit "$(cat "$attempt/code" 2>/dev/null || echo 137)"
}}

case $verb in
    start) start ;;
    follow) follow ;;
    run) start && follow ;;
esac
"""
