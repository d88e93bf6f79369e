"""Slices of a Ray cluster as hosts of a gang. The only file that imports Ray, and only when it is used.

Ray gives the first host of a TPU slice the resource `TPU-v4-256-head`, every host `TPU: 4`, and all of them the label
`ray.io/tpu-slice-name`. Reserving the first reserves the slice; requesting it is also what makes an autoscaler add one.
The other hosts are then reserved by label, each in full, in the order of Ray's `ray.io/tpu-worker-id`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from levanter.hardware import Accelerator
from levanter.infra.console import Console
from levanter.infra.errors import PEER_LOST, LaunchError
from levanter.infra.host import Host, ProcessStatus
from levanter.infra.worker_group import HostGone

if TYPE_CHECKING:
    from ray.actor import ActorHandle

INSTALL = "pip install 'levanter-fork[ray]'"
SLICE, WORKER = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
_ANSWER_SECONDS = 60.0


def import_ray() -> ModuleType:
    """Ray.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise LaunchError(f"Ray is not installed here: {INSTALL}") from error
    return ray


def import_serve() -> ModuleType:
    """Ray Serve.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise LaunchError(f"Ray Serve is not installed here: {INSTALL}") from error
    return serve


class RayHost:
    """An actor on a host."""

    def __init__(self, ray: ModuleType, actor: "ActorHandle", *, slice: int, where: str, node: str):
        self._ray, self._actor = ray, actor
        self.slice, self.where, self.node = slice, where, node

    def coordinator(self) -> str:
        """The address of this host for the others, as found by its actor."""
        return self._ask("coordinator")

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, grace: float) -> None:
        """Has the actor start the command."""
        self._ask("start", list(command), dict(environment), grace=grace)

    def news(self) -> ProcessStatus:
        """The actor's news since the last call."""
        return self._ask("news")

    def stop(self) -> None:
        """Has the actor stop the command."""
        self._ask("stop")

    def kill(self) -> None:
        """Ends the actor; its process has then lost its parent, and ends too."""
        self._ray.kill(self._actor, no_restart=True)

    def _ask(self, method: str, *arguments: object, **keywords: object) -> Any:
        try:
            # With a timeout: a host that hangs, or lost its network, must end the attempt as one that died.
            return self._ray.get(getattr(self._actor, method).remote(*arguments, **keywords), timeout=_ANSWER_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            raise HostGone(self.where) from error


class RayCluster:
    """The slices of one accelerator on a connected Ray cluster.

    Args:
        accelerator: which slices.
        console: where waiting is reported.
        wait: seconds within which slices must be available.
        intact: seconds within which all hosts of a reserved slice must have joined.
        sleep: the sleep function.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        console: Console,
        *,
        wait: float = 3600.0,
        intact: float = 120.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._ray = import_ray()
        self._accelerator, self._console = accelerator, console
        self._wait, self._intact, self._sleep = wait, intact, sleep

    @property
    def head_resource(self) -> str:
        """The resource of the first host of such a slice."""
        name = self._accelerator.libtpu_accelerator_type
        # Ray counts generations.
        return f"TPU-{name.replace('tpu7x', 'v7x')}-head"

    def acquire(self) -> list[RayHost]:
        """The hosts of all slices of the accelerator.

        Raises:
            LaunchError: they are not available in time.
        """
        deadline = time.monotonic() + self._wait
        hosts: list[RayHost] = []
        try:
            for index in range(self._accelerator.slices):
                hosts += self._slice(index, deadline)
        # Ctrl-C included: slices that are reserved already would stay reserved for as long as the driver lives.
        except BaseException:
            self.release(hosts)
            raise
        return hosts

    def release(self, members: Sequence[Any]) -> None:
        """Releases the hosts."""
        for member in members:
            member.kill()

    def _slice(self, index: int, deadline: float) -> list[RayHost]:
        hosts = self._accelerator.hosts // self._accelerator.slices
        while True:
            # Holding the head's resource reserves the slice: no other run gets it while the rest joins.
            head = self._head(index, deadline)
            members = self._slice_nodes(head.node)
            joined = time.monotonic() + self._intact
            # None if the head's own host is gone again.
            while 0 < len(members) < hosts and time.monotonic() < min(joined, deadline):
                self._sleep(1.0)
                members = self._slice_nodes(head.node)
            if len(members) == hosts:
                rest = [self._host(index, node, self._chips()) for node in members if node["NodeID"] != head.node]
                return [head, *rest]
            # A slice that stays incomplete is released, so that another one, or
            # its replacement, can be reserved.
            head.kill()
            labels = members[0].get("Labels", {}) if members else {}
            what = f"{labels.get(SLICE, 'a slice')} has {len(members)} of {hosts} hosts"
            if len(members) > hosts or time.monotonic() >= deadline:
                raise LaunchError(f"{what}, according to Ray's label {SLICE}", exit_code=PEER_LOST)
            self._console.say(f"{what}; looking for another")
            self._sleep(5.0)

    def _head(self, index: int, deadline: float) -> RayHost:
        announced = False
        while True:
            actor = self._actor(resources={self.head_resource: 1, **self._chips()})
            ready = actor.name.remote()
            # A pending actor is also what makes an autoscaler add a slice, so
            # the request stays open while it waits.
            while not self._ray.wait([ready], timeout=5.0)[0]:
                if time.monotonic() >= deadline:
                    self._ray.kill(actor, no_restart=True)
                    raise self._none_free()
                if not announced:
                    self._console.say(f"waiting for {self.head_resource}; {self._has()}")
                    announced = True
            try:
                where, node = self._ray.get([ready, actor.node.remote()])
            except self._ray.exceptions.RayActorError as error:
                # Ray offers a killed host until it has missed some of its heartbeats.
                if time.monotonic() >= deadline:
                    raise self._none_free() from error
                self._console.say("a host was lost while it was being reserved; looking for another")
                self._sleep(1.0)
                continue
            return RayHost(self._ray, actor, slice=index, where=where, node=node)

    def _none_free(self) -> LaunchError:
        return LaunchError(
            f"no {self._accelerator.libtpu_accelerator_type} slice was free within {self._wait:.0f} s "
            f"(--wait_seconds): no node offers 1 {self.head_resource} with {self._chips()}; {self._has()}",
            exit_code=PEER_LOST,
        )

    def _host(self, index: int, node: Mapping[str, Any], resources: Mapping[str, float]) -> RayHost:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # `soft=False`: on another node the actor would not be part of the slice.
        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        actor = self._actor(resources=dict(resources), scheduling_strategy=strategy)
        where = f"{node.get('NodeManagerHostname', '')} ({node['NodeManagerAddress']})"
        return RayHost(self._ray, actor, slice=index, where=where, node=node["NodeID"])

    def _actor(self, **options: object) -> "ActorHandle":
        # No restarts by Ray: a restarted actor would have lost its process;
        # `run_worker_group` restarts all of them.
        return self._ray.remote(RayActor).options(num_cpus=0, max_restarts=0, **options).remote()

    def _chips(self) -> dict[str, float]:
        return {"TPU": self._accelerator.chips_per_host}

    def _has(self) -> str:
        resources = self._ray.cluster_resources()
        heads = ", ".join(
            f"{name} × {count:.0f}" for name, count in sorted(resources.items()) if name.endswith("-head")
        )
        return f"the cluster has {heads or 'no TPU slices'}"

    def _slice_nodes(self, node_id: str) -> list[dict[str, Any]]:
        """The hosts of a node's slice, by worker id."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        head = next((node for node in alive if node["NodeID"] == node_id), None)
        if head is None:
            return []
        name = head.get("Labels", {}).get(SLICE)
        if name is None:
            return [head]
        members = [node for node in alive if node.get("Labels", {}).get(SLICE) == name]
        # Process indices must follow the worker ids of the slice, by which libtpu numbers its chips.
        return sorted(members, key=lambda node: (int(node["Labels"].get(WORKER, 0)), node["NodeManagerAddress"]))


class RayActor(Host):
    """`Host` as an actor: it learns its own address."""

    def __init__(self) -> None:
        ray = import_ray()
        super().__init__(ray.util.get_node_ip_address())

    def node(self) -> str:
        """The id of the node it is on."""
        return import_ray().get_runtime_context().get_node_id()
