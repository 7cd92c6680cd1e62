"""A Ray cluster, and what its nodes have room for: a replica for each GPU, or on a CPU for each group of cores."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

from vasuki.base.errors import Interrupted, JobFileError, one_line
from vasuki.machines.here.cpu import most_threads
from vasuki.machines.here.split import Share, split

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^/:]+|\[[^/\]]+\]):(?P<port>\d+)")
_HERE = ("ray", "auto")  # the cluster that this machine, or the Ray job around this process, belongs to
_CLIENT = "ray://"  # an address of a server through which processes outside take part, for which Ray needs gRPC
_VARIABLE = "RAY_ADDRESS"
_CONNECT_S = 5.0
_PATIENCE_S, _KNOCK_EVERY_S = 30.0, 1.0  # with a cluster that is still starting
_FIRST_START_S = 150.0  # with one whose server for clients starts a process of its own, which Ray awaits for 30 s
_SURVEY_S = 60.0


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for a replica."""

    node: str  # as Ray numbers it
    host: str
    share: Share
    here: int  # replicas that share the node
    cpus: int  # that are asked of Ray; none with a GPU


@dataclass(frozen=True, slots=True)
class _ClusterNode:
    id: str
    host: str
    cpus: int
    gpus: int


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to a cluster.

    Args:
        address: `ray` or `auto` for the one around, `ray://HOST:PORT`, or `HOST:PORT`.

    Raises:
        JobFileError: Ray is not installed, or there is no such address, or no cluster that this Ray can join.
        Interrupted: nobody answers there for half a minute, as where a cluster is still starting, nor a server for
            clients in two and a half.
    """
    asked = f"--on {address}"
    if address not in _HERE and _ADDRESS.fullmatch(address) is None:
        raise JobFileError(f"{asked}: write ray, auto or ray://HOST:PORT")
    if address in _HERE and (said := os.environ.get(_VARIABLE)):
        address, asked = said, f"{asked} ({_VARIABLE}={said})"
    ray = import_ray(asked, "grpc" if address.startswith(_CLIENT) else "ray")
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    since_s, waits = time.monotonic(), False
    while missing := _not_joined(ray, address, asked):
        patience_s = _FIRST_START_S if "client server" in missing else _PATIENCE_S
        if time.monotonic() >= since_s + patience_s:
            raise Interrupted(f"{asked}: no Ray cluster there yet: {missing}; run the same command again")
        if not waits:
            log.info("waiting for the Ray cluster at %s: %s", address, missing)
        waits = True
        time.sleep(_KNOCK_EVERY_S)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray has one of its own
    try:
        with redirect_stdout(_Unheard()):
            yield
    finally:
        ray.shutdown()


def _not_joined(ray: Any, address: str, asked: str) -> str:
    """Connect with a cluster, or say why nobody answers yet. Raises JobFileError for what will not change."""
    try:
        where = _found(address)
        if match := _ADDRESS.fullmatch(where):  # Ray itself would knock for minutes, and fill the log meanwhile
            socket.create_connection((match["host"].strip("[]"), int(match["port"])), _CONNECT_S).close()
        with warnings.catch_warnings(action="ignore"):
            ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
        return ""
    except (OSError, RuntimeError, ImportError, ValueError, OverflowError) as error:
        message = getattr(error, "strerror", None) or one_line(error).split(". ")[0]
        may_start = isinstance(error, (OSError, RuntimeError)) and not isinstance(error, socket.gaierror)
        is_another = "ersion" in message  # of Ray or of Python
        if is_another or not may_start or _ADDRESS.fullmatch(address) is None:
            raise JobFileError(f"{asked}: no Ray cluster there, or not one of this Ray: {message}") from None
    if "timeout" in message:  # of a server that takes the connection and says nothing
        message += "; one that wants a token gets it with RAY_AUTH_MODE=token"
    return message


def import_ray(asked: str, needed: str = "ray") -> Any:
    """The package. Raises JobFileError if it or a package that Ray needs for what is asked is not installed."""
    try:
        import_module(needed)
        import ray
    except ModuleNotFoundError as error:
        raise JobFileError(f"{asked} needs Ray, and {error.name} is not installed: pip install 'vasuki[ray]'") from None
    return ray


def _found(address: str) -> str:
    """An address as Ray reads it on this machine, which for `auto` looks for a cluster.

    Raises:
        ConnectionError: there is none around.
        ValueError: this is no address.
    """
    if address.startswith(_CLIENT):
        return address
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address("auto" if address in _HERE else address))


class _Unheard(io.TextIOBase):
    """A standard output that drops what Ray prints. When a node dies Ray prints pages of that node's log there, which
    no option keeps it from, and where a command may be about to print JSON."""

    def write(self, text: str) -> int:
        if text.strip():
            log.debug("Ray: %s", text.strip())
        return len(text)


class Nodes:
    """The nodes of the cluster that this process is connected with.

    Args:
        device: `auto`, `cpu` or `cuda`, as in a job; `auto` is GPUs if there are any.
        replicas: how many; `auto` is one for each GPU, or for each node of a CPU's memory.

    Raises:
        JobFileError: there are no such devices, or fewer, or a node has another vasuki.
    """

    def __init__(self, device: str, replicas: int | Literal["auto"]) -> None:
        import ray

        self.most = replicas
        self._asked: set[str] = set()
        self._asking: dict[Any, _ClusterNode] = {}
        self.on_gpus = device != "cpu" and any(node.gpus for node in self._alive())
        if device == "cuda" and not self.on_gpus:
            raise JobFileError("engine.device: cuda asks for GPUs, and the Ray cluster has none")
        nodes = [node for node in self._alive() if self._has_room(node)]
        there, what = sum(node.gpus if self.on_gpus else node.cpus for node in nodes), "GPU" if self.on_gpus else "CPU"
        if not there or (replicas != "auto" and replicas > there):
            asked = f"engine.replicas: {replicas} are asked for" if there else "a replica needs a CPU or a GPU"
            has = f"{there} {what}{'s' * (there > 1)}" if there else "none that is free for work"
            raise JobFileError(f"{asked}, and the Ray cluster has {has}")
        self._groups: int | Literal["auto"] = "auto" if replicas == "auto" else -(-replicas // len(nodes))
        self.slots: list[Slot] = []
        self.ask()
        ready, _ = ray.wait(self.asking, num_returns=len(self.asking), timeout=_SURVEY_S)
        for answer in ready:
            slots, refused = self.answered(answer)
            if refused:
                raise JobFileError(refused)
            self.slots += slots
        if not self.slots:
            raise Interrupted("no node of the Ray cluster answers; run the same command again")
        if device == "auto" and not self.on_gpus:
            log.warning("the Ray cluster has no GPU, so replicas take CPUs; engine.device: cuda would not")

    def free(self) -> tuple[int, int]:
        """GPUs, or CPUs where replicas take those, that nobody in the cluster uses, and all that there are."""
        import ray

        what = "GPU" if self.on_gpus else "CPU"
        return int(ray.available_resources().get(what, 0)), int(ray.cluster_resources().get(what, 0))

    def alive(self) -> set[str]:
        """Ids of the nodes that are there. Raises Interrupted if the cluster is gone."""
        return {node.id for node in self._alive()}

    @property
    def asking(self) -> list[Any]:
        """Answers that are waited for, by `ray.wait`, and are due to `answered`."""
        return list(self._asking)

    def ask(self) -> None:
        """Ask nodes that are new what they have."""
        from ray import remote
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in self._alive():
            if node.id not in self._asked and self._has_room(node):
                self._asked.add(node.id)
                where = NodeAffinitySchedulingStrategy(node.id, soft=False)
                task = remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(_survey())
                groups = 1 if self.on_gpus else self._groups
                self._asking[task.remote(metadata.version("vasuki"), node.cpus, groups)] = node

    def answered(self, answer: Any) -> tuple[list[Slot], str]:
        """What a node has room for, or why it cannot take part; neither if it is gone already."""
        from ray import get
        from ray.exceptions import RayError

        node = self._asking.pop(answer)
        try:
            version, shares = get(answer)
        except RayError:
            self._asked.discard(node.id)  # asked again if it is still there
            return [], ""
        own = metadata.version("vasuki")
        if version != own:
            theirs = f"has vasuki {version}" if version else "has no vasuki"
            return [], f"node {node.host} {theirs}, and this is {own}: install the same on all nodes"
        if self.on_gpus:
            return [Slot(node.id, node.host, Share(gpu=str(gpu)), node.gpus, 0) for gpu in range(node.gpus)], ""
        return [Slot(node.id, node.host, share, len(shares), node.cpus // len(shares)) for share in shares], ""

    def _alive(self) -> list[_ClusterNode]:
        import ray

        try:
            listed = ray.nodes()
        except Exception as error:  # of gRPC, of Ray, of sockets
            raise Interrupted(f"the Ray cluster names no nodes: {one_line(error)}") from None
        nodes = [node for node in listed if node["Alive"]]
        return [
            _ClusterNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
            )
            for node in nodes
        ]

    def _has_room(self, node: _ClusterNode) -> bool:
        return node.gpus > 0 if self.on_gpus else node.cpus > 0


def shares_of_node(cpus: int, groups: int | Literal["auto"]) -> list[Share]:
    """Groups of this machine's cores; where Ray may use only some, of as many threads, on whichever cores.

    Args:
        cpus: that Ray may use here.
        groups: how many; `auto` is one for each node of memory.
    """
    cpus = min(cpus, most_threads() or cpus)
    wanted = groups if groups == "auto" else min(groups, cpus)
    if hasattr(os, "sched_getaffinity") and cpus >= len(os.sched_getaffinity(0)):
        try:
            return split("cpu", wanted)
        except JobFileError:  # Ray counts threads of a core as CPUs
            pass
    number = 1 if wanted == "auto" else wanted
    return [Share(threads=max(1, cpus // number))] * number


def _survey() -> Callable[[str, int, int | Literal["auto"]], tuple[str, list[Share]]]:
    """The task that looks around on a node: a function within one travels whole, also to where there is no vasuki."""

    def survey(own: str, cpus: int, groups: int | Literal["auto"]) -> tuple[str, list[Share]]:
        from importlib import metadata

        try:
            version = metadata.version("vasuki")
        except metadata.PackageNotFoundError:
            return "", []
        if version != own:
            return version, []
        from vasuki.runs.workers.ray.nodes import shares_of_node

        return version, shares_of_node(cpus, groups)

    return survey
