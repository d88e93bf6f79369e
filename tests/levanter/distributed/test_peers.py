"""Roll call, barriers and departures over real sockets, without JAX: each process of the run is a thread here."""

import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.processes import free_port

from levanter.distributed import agreement, coordinator, peers, rendezvous
from levanter.distributed.agreement import (
    agreed,
    agreed_stop,
    barrier,
    process_0_first,
    require_same,
    require_same_values,
    set_peers,
)
from levanter.distributed.coordinator import RendezvousError, format_processes
from levanter.distributed.peers import PeerLostError, Peers, PeersDifferError, Timeouts
from levanter.distributed.rendezvous import ProcessPlace, connect_peers

VERSIONS = {"jax": "1"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(peers, "GATHER_SECONDS", 0.2)


def together(call, count):
    """Calls `call(number)` in as many threads; what each returned or raised."""

    def kept(number):
        try:
            return call(number)
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(kept, range(count)))


def met(count, *, told=None, versions=None, port=None, **timeouts):
    """The roll call of a run: peers of each process, or its error."""
    port = port or free_port()
    waits = Timeouts(**{"roll": 100.0, "barrier": 100.0, "heartbeat": 60.0, **timeouts})

    def one(number):
        place = ProcessPlace(coordinator=f"localhost:{port}", processes=told or count, process=number)
        return connect_peers(place, versions=(versions or {}).get(number, VERSIONS), timeouts=waits)

    return together(one, count)


@pytest.fixture
def four():
    found = met(4)
    assert all(isinstance(each, Peers) for each in found), found
    yield found
    for each in found:
        each.leave(0)


def close(one):
    """What the kernel does when a process is killed."""
    one._leaving = True
    one._wire.close()


def test_all_know_all(four):
    for number, each in enumerate(four):
        assert (each.process, each.count) == (number, 4)
        assert [member.process for member in each.roster] == [0, 1, 2, 3]
        assert each.roster[2].host == socket.gethostname()


def test_the_port_is_free_again_behind_the_roll_call():
    port = free_port()
    found = met(3, port=port)
    # JAX's service listens there next, while our connections on it stay open.
    deadline = time.monotonic() + 100
    while True:
        try:
            listener = coordinator.listen(port)
            break
        except RendezvousError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert together(lambda n: found[n].meet("still open"), 3) == [("", {})] * 3
    listener.close()


def test_who_is_missing_is_named_on_all_that_are_there(caplog, monkeypatch):
    monkeypatch.setattr(coordinator, "PROGRESS_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING):
        found = met(3, told=6, roll=3.0)
    for error in found:
        assert isinstance(error, RendezvousError) and error.exit_code == 5
        assert re.search(r"3 of 6 processes joined within 3 s; missing: 3–5; joined: 0 \(", str(error))
    assert re.search(r"3 of 6 processes have joined after \d s; missing: 3–5", caplog.text)


def test_without_process_0_the_others_say_so():
    place = ProcessPlace(coordinator=f"localhost:{free_port()}", processes=2, process=1)
    with pytest.raises(
        RendezvousError, match=r"process 1 of 2: process 0 does not answer at localhost:\d+ \(.*refused"
    ):
        connect_peers(place, versions=VERSIONS, timeouts=Timeouts(roll=1.0))


def test_a_taken_port_is_named(monkeypatch):
    with socket.create_server(("", 0)) as other:
        place = ProcessPlace(coordinator=f"localhost:{other.getsockname()[1]}", processes=2, process=0)
        monkeypatch.setattr(rendezvous, "TAKEN_PORT_SECONDS", 0.2)
        with pytest.raises(RendezvousError, match=r"process 0 cannot listen on port \d+ of .*in use"):
            connect_peers(place, versions=VERSIONS, timeouts=Timeouts(roll=1.0))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"versions": {1: {"jax": "2"}}}, "process 1 on .* has jax 2, process 0 has jax 1"),
        ({"numbers": [0, 1, 1]}, r"two processes have number 1: on .* \(pid \d+\) and on"),
        # The second one cannot listen; the first one must not wait for the others meanwhile.
        ({"numbers": [0, 0, 1]}, r"two processes have number 0: on .* \(pid \d+\) and on"),
        ({"counts": [3, 3, 4]}, "process 2 on .* expects 4 processes, process 0 expects 3"),
    ],
    ids=["versions", "two of number 1", "two of number 0", "counts"],
)
def test_processes_that_do_not_belong_together(what, message):
    port = free_port()

    def one(n):
        place = ProcessPlace(
            coordinator=f"localhost:{port}",
            processes=what.get("counts", [3] * 3)[n],
            process=what.get("numbers", [0, 1, 2])[n],
        )
        return connect_peers(place, versions=what.get("versions", {}).get(n, VERSIONS), timeouts=Timeouts(roll=5.0))

    found = together(one, 3)
    assert any(isinstance(each, RendezvousError) and re.search(message, str(each)) for each in found), found
    assert not any(isinstance(each, Peers) for each in found), found


def test_strangers_at_the_port_do_no_harm():
    port, asked = free_port(), threading.Event()

    def knock():
        """A connection, as soon as process 0 listens."""
        deadline = time.monotonic() + 100
        while True:
            try:
                return socket.create_connection(("localhost", port))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def one(number):
        if number == 2:
            with knock() as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                asked.set()
                return stranger.recv(10)
        if number == 1:
            # Who is missing keeps process 0 listening.
            assert asked.wait(100)
        place = ProcessPlace(coordinator=f"localhost:{port}", processes=2, process=number)
        return connect_peers(place, versions=VERSIONS, timeouts=Timeouts(roll=100.0))

    found = together(one, 3)
    assert isinstance(found[0], Peers) and isinstance(found[1], Peers) and found[2] == b""


def test_barriers_hold_back_and_pass_values(four):
    order = []

    def one(number):
        time.sleep(0.05 * number)
        order.append(number)
        first = four[number].meet("first", value=f"v{min(number, 1)}")
        assert sorted(order[:4]) == [0, 1, 2, 3]
        return first, four[number].meet("first"), four[number].meet("second")

    values = ("v0", {1: "v1", 2: "v1", 3: "v1"})
    assert together(one, 4) == [(values, ("", {}), ("", {}))] * 4


def test_who_does_not_come_is_named_with_where_it_was():
    found = met(4)

    def one(number):
        found[number].meet("loading weights")
        return None if number == 2 else found[number].meet("the first step", seconds=2.0)

    results = together(one, 4)
    for number in (0, 1, 3):
        text = str(results[number])
        assert isinstance(results[number], PeerLostError)
        assert f"process {number} of 4 waited 2 s in barrier 'the first step'; missing:" in text
        assert re.search(r"process 2 \(.*\): last seen after barrier 'loading weights'", text)
        assert "here: 0, 1, 3" in text


@pytest.mark.parametrize("victims", [[1], [3, 2]])
def test_who_is_killed_is_named_within_seconds(victims, monkeypatch):
    if len(victims) > 1:
        # The connections close one after the other.
        monkeypatch.setattr(peers, "GATHER_SECONDS", 2.0)
    found = met(4)
    together(lambda n: found[n].meet("loading weights"), 4)
    told = {}
    ended = threading.Event()
    survivors = [n for n in range(4) if n not in victims]
    for n in survivors:

        def end(error, n=n):
            told[n] = str(error)
            if len(told) == len(survivors):
                ended.set()

        found[n].on_lost(end)
    for victim in victims:
        close(found[victim])
    assert ended.wait(100)
    for n, text in told.items():
        assert text.startswith(f"process{'es' * (len(victims) > 1)} {format_processes(victims)} of 4 ")
        assert f"noticed by process {n} after barrier 'loading weights'" in text
        for victim in victims:
            assert re.search(rf"process {victim} \(.*\) was lost: .*connection closed", text)


def test_waiting_in_a_barrier_ends_when_somebody_is_gone():
    found = met(3)

    def one(number):
        if number == 1:
            time.sleep(0.3)
            close(found[1])
            return None
        return found[number].meet("saving", seconds=60)

    results = together(one, 3)
    assert "process 1 of 3 is missing; noticed by process 0 in barrier 'saving'" in str(results[0])
    assert "process 1 of 3 is missing; noticed by process 2 in barrier 'saving'" in str(results[2])


def test_silence_counts_as_gone():
    found = met(3, heartbeat=2.0)
    # It is there, and hangs: nothing is said and nothing is closed.
    found[1]._leaving = True
    assert found[0].wait_lost(100) and found[2].wait_lost(100)
    assert re.search(r"process 1 \(.*\) was lost: no heartbeat for 2 s", str(found[2].lost()))


def test_who_ends_with_an_error_says_why(four):
    four[2].leave(2, "no such file: books/gatsby.txt")
    assert four[0].wait_lost(100)
    text = str(four[0].lost())
    assert re.search(r"process 2 \(.*\) ended with exit code 2: no such file: books/gatsby.txt", text)
    # Who ends because of that is no cause.
    four[0].leave(5, text)
    assert four[1].wait_lost(100)
    assert str(four[1].lost()).startswith("process 2 of 4 is missing")
    assert four[3].exit_reason(2, 100) == "no such file: books/gatsby.txt"


def in_all(found, call):
    """Calls `call(number)` for one process after another to be the current one; for calls that wait for nobody."""
    for number, each in enumerate(found):
        set_peers(each)
        try:
            call(number)
        finally:
            set_peers(None)


def test_alone_every_barrier_is_open():
    barrier("x")
    assert agreed("id", "a") == "a"
    require_same("text", "a", advice="none")
    with process_0_first("data", seconds=1):
        pass
    told = threading.Event()
    assert agreed_stop(told.is_set)() is False


def test_one_that_is_told_to_stop_stops_all_behind_the_same_step():
    found = met(3)
    told = [threading.Event() for _ in found]
    # As the collectives of a step: nobody is more than one ahead.
    step_of_all = threading.Barrier(3)
    asks = []
    in_all(found, lambda n: asks.append(agreed_stop(told[n].is_set)))

    def one(number):
        for step in range(1000):
            if (number, step) == (2, 5):
                told[2].set()
            step_of_all.wait(100)
            time.sleep(0.002)
            if asks[number]():
                return step
        return None

    steps = together(one, 3)
    assert len(set(steps)) == 1 and isinstance(steps[0], int) and steps[0] >= 5, steps


def test_what_differs_is_listed():
    found = met(3)
    errors = []

    def one(number):
        first, others = found[number].meet("the checkpoint", value="none" if number == 1 else "step 4")
        return first, others

    assert together(one, 3) == [("step 4", {1: "none"})] * 3

    def refuse(number):
        # `require_same` on process 1 while the others answer directly.
        if number == 1:
            set_peers(found[1])
            try:
                require_same("the checkpoint to resume from", "none", advice="share the disk")
            except PeersDifferError as error:
                errors.append(str(error))
            finally:
                set_peers(None)
        else:
            found[number].meet("the checkpoint to resume from", value="step 4")

    together(refuse, 3)
    (text,) = errors
    assert re.match(r"the checkpoint to resume from differs between processes:\n  process 0 \(.*\): step 4\n", text)
    assert re.search(r"  process 1 \(.*\): none\n  → share the disk", text)


def test_which_of_many_values_differ_is_listed(monkeypatch):
    found, mine = met(3), threading.local()

    class Current:
        """Each thread is a process of its own."""

        @property
        def peers(self):
            return mine.peers

    monkeypatch.setattr(agreement, "_current", Current())

    def run(number, values):
        mine.peers = found[number]
        require_same_values("the configuration", values, advice="the same words")

    same = {f"key{n}": "1" for n in range(9)}
    assert together(lambda number: run(number, same), 3) == [None] * 3
    other = {**dict.fromkeys(same, "2"), "more": "3"}
    errors = together(lambda number: run(number, other if number == 2 else same), 3)
    assert all(isinstance(error, PeersDifferError) for error in errors)
    lines = str(errors[1]).splitlines()
    assert lines[0] == "the configuration differs between processes:" and lines[1].endswith("): 9 values")
    assert lines[2].endswith("key0 2 (process 0: 1); key1 2 (process 0: 1); key2 2 (process 0: 1), and 7 more")
    assert lines[3] == "  → the same words" and len(lines) == 4


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([1], "1"), ([1, 2], "1, 2"), ([0, 1, 2, 5, 7, 8, 9, 10], "0–2, 5, 7–10"), ([], "")],
)
def test_numbers_are_shown_with_ranges(numbers, text):
    assert format_processes(numbers) == text
