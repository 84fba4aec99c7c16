"""Nodes of the bandwidth lab: network namespaces on one machine, joined by limited links.

Each node is a namespace with one interface, `eth0`, whose peer is a port of a bridge that sits in a
namespace of its own:

    node 0: eth0 ==veth== port0 --+
                                  +-- br0      (the switch)
    node 1: eth0 ==veth== port1 --+

Both ends of a link send at the rate of the link, so that a node neither sends nor receives faster.
Ranks of one node reach each other at the address of `eth0` over the loopback interface, which has
no limit. Nothing outside of these namespaces is touched, and nothing leads out of them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_SUBNET = "10.77.0"
_QUEUE_MS = 30  # of a full queue, as a switch with little memory has
_MIN_BURST_BYTES = 70_000  # a segment that the kernel has not cut into packets yet
_BURST_S = 1e-3
# Ends what still runs on a node, and removes it.
_END = "ip netns pids $n | xargs -r kill -9; ip netns del $n"
_OF_A_LAB = re.compile(r"loco-[a-z]+-(\d+)-[0-9a-f]{6}.*")  # with its process id
_COMMAND_S = 30.0  # far more than any of these commands takes


class LabError(RuntimeError):
    """The lab cannot run, or a rank failed; the message says why and what helps."""


def check_machine() -> None:
    """Raise LabError, with the remedy, where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise LabError("the lab makes network namespaces, which needs root: run it as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"the lab needs {tool} of iproute2: apt-get install -y iproute2")
    name = _unique_name("try")
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    except LabError as error:
        raise LabError(
            f"this kernel or container does not allow network namespaces: {error}"
        ) from (None)
    finally:
        _try("ip", "netns", "del", name)


class LabNetwork:
    """`num_nodes` namespaces and their switch, there while it is entered.

    Attributes:
        nodes: names of the namespaces.
        addresses: of the nodes' interfaces.
    """

    def __init__(self, num_nodes: int) -> None:
        prefix = _unique_name("lab")
        self._switch = f"{prefix}-switch"
        self.nodes = [f"{prefix}-node{node}" for node in range(num_nodes)]
        self.addresses = [f"{_SUBNET}.{node + 1}" for node in range(num_nodes)]
        self._janitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LabNetwork:
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def command(self, node: int, *command: str) -> list[str]:
        """The command line that runs `command` on a node; `ip` then becomes that program."""
        return ["ip", "netns", "exec", self.nodes[node], *command]

    def limit(self, rate: float, delay_s: float = 0.0) -> None:
        """Let each link carry `rate` bits/s in each direction, `delay_s` late.

        Raises:
            LabError: a delay is asked for, and this kernel has no `netem`.
        """
        burst_bytes = max(_MIN_BURST_BYTES, int(rate / 8 * _BURST_S))
        bucket = f"tbf rate {int(rate)}bit burst {burst_bytes} latency {_QUEUE_MS}ms".split()
        for node, name in enumerate(self.nodes):
            # The same rule again may not change a queue in place: always make it anew.
            for namespace, device in ((name, INTERFACE), (self._switch, f"port{node}")):
                _try("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *bucket)
            port = ("tc", "-n", self._switch, "qdisc", "add", "dev", f"port{node}", "root")
            if not delay_s:
                _run(*port, *bucket)
                continue
            packets = int(rate / 8 * (delay_s + _QUEUE_MS * 1e-3) / 1500) + 1000
            delay = f"netem delay {delay_s * 1e6:.0f}us rate {int(rate)}bit limit {packets}"
            try:
                _run(*port, *delay.split())
            except LabError as error:
                raise LabError(f"a delay needs the kernel module sch_netem: {error}") from None

    def _make(self) -> None:
        # Removes everything once the pipe closes, which it also does if this process is killed.
        names = " ".join([*self.nodes, self._switch])
        self._janitor = subprocess.Popen(
            ["sh", "-c", f"read line; for n in {names}; do {_END}; done"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        switch = ("ip", "-n", self._switch)
        _run("ip", "netns", "add", self._switch)
        _run(*switch, "link", "add", "br0", "type", "bridge")
        _run(*switch, "link", "set", "br0", "up")
        for node, (name, address) in enumerate(zip(self.nodes, self.addresses, strict=True)):
            port = f"port{node}"
            _run("ip", "netns", "add", name)
            # What every node would say to the others by itself is no traffic of ours.
            quiet = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"
            _try(*self.command(node, "sh", "-c", quiet))
            link = ("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run(*switch, *link)
            _run(*switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            route = _run("ip", "-n", name, "route", "get", address)
            if "dev lo" not in route:
                raise LabError(f"ranks of one node would not talk over loopback, but by {route}")

    def _remove(self) -> None:
        if self._janitor is not None:
            try:
                self._janitor.communicate(timeout=_COMMAND_S)
            except subprocess.TimeoutExpired:
                raise LabError(
                    f"namespaces {' '.join([*self.nodes, self._switch])} are not removed after "
                    f"{_COMMAND_S:.0f} s; the next run of the lab tries again"
                ) from None
            finally:
                self._janitor = None


def remove_leftovers() -> None:
    """Remove the namespaces of labs that no longer run, should one have been killed with all its
    helpers at once."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = _OF_A_LAB.fullmatch(name)
        if owner and not Path("/proc", owner[1]).exists():
            _try("sh", "-c", f"n={name}; {_END}")


def _unique_name(what: str) -> str:
    return f"loco-{what}-{os.getpid()}-{secrets.token_hex(3)}"


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail, but not go on for ever."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(command)}: not done after {_COMMAND_S:.0f} s") from None


def _run(*command: str) -> str:
    done = _try(*command)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
