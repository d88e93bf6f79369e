"""Checkpoints on web servers that are slow, broken, changed in the middle, or no servers for checkpoints at all."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, strike_apart, table
from helpers.object_store import Fault, ObjectStore, Request, files_of
from helpers.tiny_runs import make_inputs

from levanter.io.ranges import fetcher

OK, BAD, INTERRUPTED = 0, 2, 130
WEIGHTS = "m/model.safetensors"


@dataclass
class Servers:
    """Servers that a row started, ended with its test."""

    stack: ExitStack = field(default_factory=ExitStack)
    last: ObjectStore | None = None

    def serve(self, folder: Path, fault: Callable[[Request], Fault | None], **more: object) -> ObjectStore:
        files = {f"m/{name}": path for name, path in files_of(folder).items()}
        self.last = self.stack.enter_context(ObjectStore(files, fault=fault, **more))
        return self.last


SERVERS = Servers()


@pytest.fixture(autouse=True)
def servers(monkeypatch) -> Iterator[Servers]:
    """Ends what a row started; delays before another try are short here."""
    monkeypatch.setattr(fetcher, "DELAYS", (0.02, 0.02, 0.02))
    monkeypatch.setattr(fetcher, "QUICK_DELAYS", (0.02,))
    monkeypatch.setattr(
        fetcher.RangeFetcher.__init__,
        "__kwdefaults__",
        {**fetcher.RangeFetcher.__init__.__kwdefaults__, "delays": (0.02, 0.02, 0.02)},
    )
    SERVERS.stack, SERVERS.last = ExitStack(), None
    with SERVERS.stack:
        yield SERVERS


def evaluated(fault: Callable[[Request], Fault | None], **more: object) -> Callable[[Path], list[str]]:
    """An evaluation of the tiny model by HTTP."""

    def words(folder: Path) -> list[str]:
        inputs = make_inputs(folder)
        store = SERVERS.serve(inputs.model, fault, **more)
        return [*inputs.eval_lm(folder / "run")[1:], f"--hf_checkpoint={store.url}/m"]

    return words


def weights(fault: Fault, *, times: int = 10**9) -> Callable[[Request], Fault | None]:
    """Breaks what is asked of the weights, behind their header, so many times a range."""

    def chosen(request: Request) -> Fault | None:
        if request.file != WEIGHTS or not request.start or SERVERS.last is None:
            return None
        # A range that broke off is asked for again from where it was: it is known by its end.
        before = sum((each.file, each.stop) == (WEIGHTS, request.stop) for each in SERVERS.last.log) - 1
        return fault if before < times else None

    return chosen


def opening(fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda r: fault if r.file == WEIGHTS else None


def config(fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda r: fault if r.file == "m/config.json" else None


def replaced(request: Request) -> Fault | None:
    """The file is another one once its header was read."""
    store = SERVERS.last
    if request.file == WEIGHTS and request.start > 0 and store is not None:
        path = store.files[WEIGHTS]
        if isinstance(path, Path):
            store.files[WEIGHTS] = path.read_bytes()[:-64] + b"\1" * 64
    return None


TRIED = ("tried 4 times in", "→ run again when the server works again")
ROWS = [
    Attack(name="well", command="eval_lm", words=evaluated(lambda r: None), code=OK),
    Attack(name="503 now and then", command="eval_lm", words=evaluated(weights(Fault(status=503), times=1)), code=OK),
    Attack(name="resets", command="eval_lm", words=evaluated(weights(Fault(reset_after=50), times=2)), code=OK),
    Attack(name="short bodies", command="eval_lm", words=evaluated(weights(Fault(end_after=50), times=2)), code=OK),
    Attack(
        name="a 500 that stays",
        command="eval_lm",
        words=evaluated(weights(Fault(status=500))),
        code=BAD,
        says=("model.safetensors: bytes ", *TRIED, "500 Internal Server Error (4 times)"),
    ),
    Attack(
        name="resets that stay",
        command="eval_lm",
        words=evaluated(weights(Fault(reset_after=0))),
        code=BAD,
        says=("model.safetensors: bytes ", *TRIED, "connection"),
    ),
    Attack(
        name="short for ever",
        command="eval_lm",
        words=evaluated(weights(Fault(end_after=50))),
        code=BAD,
        says=(*TRIED, "the answer ended early (4 times); 200 bytes arrived"),
    ),
    Attack(
        name="a wrong range for ever",
        command="eval_lm",
        words=evaluated(weights(Fault(headers={"Content-Range": "bytes 0-1/2"}))),
        code=BAD,
        says=("was replaced while it was read", "has 2 now"),
    ),
    Attack(
        name="replaced in the middle",
        command="eval_lm",
        words=evaluated(replaced),
        code=BAD,
        says=("model.safetensors: it was replaced while it was read: its version was", "→ load again"),
    ),
    Attack(
        name="gone in the middle",
        command="eval_lm",
        words=evaluated(weights(Fault(status=404))),
        code=BAD,
        says=("it no longer exists (404 Not Found)",),
    ),
    Attack(
        name="forbidden in the middle",
        command="eval_lm",
        words=evaluated(weights(Fault(status=403))),
        code=BAD,
        says=("the server refuses bytes", "check the credentials"),
    ),
    Attack(
        name="no ranges",
        command="eval_lm",
        words=evaluated(opening(Fault(ignore_range=True))),
        code=BAD,
        says=("model.safetensors: the server sends all", "does not support ranges", "copy the files to a local disk"),
    ),
    Attack(
        name="compressed",
        command="eval_lm",
        words=evaluated(opening(Fault(headers={"Content-Encoding": "gzip"}))),
        code=BAD,
        says=("the server sends it compressed (gzip)",),
    ),
    Attack(
        name="a header of garbage",
        command="eval_lm",
        words=evaluated(
            lambda r: Fault(body=b"<html>" * 20_000) if r.file == WEIGHTS and r.stop and r.stop > 1 else None
        ),
        code=BAD,
        says=("model.safetensors: corrupt safetensors header",),
    ),
    Attack(
        name="a page instead of config.json",
        command="eval_lm",
        words=evaluated(config(Fault(body=b"<html>log in</html>", headers={"Content-Length": "19"}))),
        code=BAD,
        says=("config.json", "not UTF-8 JSON"),
    ),
    Attack(
        name="no such model",
        command="eval_lm",
        words=lambda folder: [*evaluated(lambda r: None)(folder)[:-1], f"--hf_checkpoint={SERVERS.last.url}/none"],
        code=BAD,
        says=("/none: there is no config.json",),
    ),
    Attack(
        name="nobody listens",
        command="eval_lm",
        words=lambda folder: [*make_inputs(folder).eval_lm(folder / "run")[1:], "--hf_checkpoint=http://127.0.0.1:9/m"],
        code=BAD,
        says=("http://127.0.0.1:9/m/", "connection refused"),
    ),
    Attack(
        name="redirected for ever",
        command="eval_lm",
        words=evaluated(opening(Fault(status=302, headers={"Location": f"/{WEIGHTS}"}))),
        code=BAD,
        says=("redirected more than 5 times",),
    ),
    Attack(
        name="a plan of it, which fetches nothing",
        command="plan",
        words=lambda folder: [
            "eval_lm",
            *evaluated(weights(Fault(status=500)))(folder),
            "--target=local",
            "--no-compile",
        ],
        code=BAD,
        says=("it is not on this machine",),
        never=("500 Internal",),
    ),
]
QUICK = ["503 now and then", "replaced in the middle", "a 500 that stays", "no ranges"]


@pytest.mark.parametrize("attack", table(ROWS, in_make_test=QUICK))
def test_broken_servers(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
    if attack.code == OK and attack.command == "eval_lm":
        assert json.loads((tmp_path / "run" / "out.json").read_text())


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_stalled_load(tmp_path):
    """Bodies that stop half-way: whoever presses Ctrl-C has the prompt back in seconds."""
    words = evaluated(weights(Fault(stall_after=10)))
    attack = Attack(name="ctrl-c", command="eval_lm", words=words, code=INTERRUPTED, says=("interrupted",), seconds=60)
    took = []

    def press(process) -> None:
        def later() -> None:
            while not (SERVERS.last and SERVERS.last.under_way > 2):
                time.sleep(0.05)
            time.sleep(0.5)
            took.append(time.monotonic())
            process.send_signal(2)

        threading.Thread(target=later, daemon=True).start()

    outcome = strike_apart(attack, tmp_path, during=press)
    judge(attack, outcome)
    assert time.monotonic() - took[0] < 10
