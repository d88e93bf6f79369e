"""Which carrier a program meets by. JAX's service with real processes: tests/levanter/checkpoint."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.processes import free_port

from levanter.distributed.agreement import set_peers
from levanter.distributed.peers import Timeouts
from levanter.distributed.process_group import PeerGroup, SingleProcess, process_group
from levanter.distributed.rendezvous import ProcessPlace, connect_peers

pytestmark = pytest.mark.quick


def test_one_process_decides_for_itself():
    alone = process_group()
    assert isinstance(alone, SingleProcess) and alone.decides
    assert alone.follow("is it due", lambda: "yes", seconds=0.1) == "yes"
    alone.wait("everybody", seconds=0.1)


def test_two_processes_take_the_word_of_the_first():
    port = free_port()
    places = [ProcessPlace(process=n, processes=2, coordinator=f"127.0.0.1:{port}", source="test") for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda place: connect_peers(place, versions={}, timeouts=Timeouts()), places))
        try:
            groups = [PeerGroup(peers) for peers in both]
            assert [group.decides for group in groups] == [True, False]
            for n in range(3):
                answers = pool.map(
                    lambda pair, n=n: pair[1].follow("due", lambda: f"{pair[0]} said {n}", seconds=20.0),
                    enumerate(groups),
                )
                assert list(answers) == [f"0 said {n}"] * 2
            list(pool.map(lambda group: group.wait("the end", seconds=20.0), groups))
            set_peers(both[1])
            assert isinstance(process_group(), PeerGroup) and not process_group().decides
        finally:
            set_peers(None)
            list(pool.map(lambda peers: peers.leave(0), both))
