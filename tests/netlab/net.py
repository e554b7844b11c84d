"""A little internet in network namespaces: one public host and two sites behind NAT, with faults to order.

    public host  pub  203.0.113.10   ---+
    gateway A    gwA  203.0.113.21   ---+--- switch "inet": a bridge without an address, no way to the real network
      nodes a1 10.1.0.11, a2 10.1.0.12      (outbound only: unasked packets are dropped)
    gateway B    gwB  203.0.113.22   ---+
      nodes b1 10.2.0.11, b2 10.2.0.12

Every address lives inside a namespace of this lab, and all of them go with it. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

HUB_ADDRESS = "203.0.113.10"
GATEWAYS = {"gwA": ("203.0.113.21", "10.1.0.1"), "gwB": ("203.0.113.22", "10.2.0.1")}
_CLONE_NEWNET = 0x40000000
_ETC = Path("/etc/netns")
_numbers = itertools.count(1)

_FAULT_RULES = """
table inet lab {
  chain rx { type filter hook prerouting priority -300; policy accept; }
  chain tx { type filter hook postrouting priority 300; policy accept; }
}
"""
# What nobody asked for is dropped in silence: a gateway that answered would tell inner hosts' ports apart.
_GATEWAY_RULES = """
table ip nat {
  chain post { type nat hook postrouting priority 100; oifname "wan" masquerade; }
}
table inet fw {
  chain toself {
    type filter hook input priority 0; policy drop;
    iifname { "lan", "lo" } accept
    ct state established,related accept
  }
  chain through {
    type filter hook forward priority 0; policy drop;
    ct state invalid drop
    ct state established,related accept
    iifname "lan" accept
  }
  chain closed { type filter hook forward priority -10; policy accept; }
}
"""


@dataclass(frozen=True)
class Host:
    """One host: its device towards the others, and whom it is wired to."""

    name: str
    address: str
    switch: str = "inet"
    bridge: str = "br0"
    device: str = "eth0"
    route: str = ""


HOSTS = {
    host.name: host
    for host in (
        Host("pub", HUB_ADDRESS),
        Host("gwA", GATEWAYS["gwA"][0], device="wan"),
        Host("gwB", GATEWAYS["gwB"][0], device="wan"),
        Host("a1", "10.1.0.11", "gwA", "lan", route="10.1.0.1"),
        Host("a2", "10.1.0.12", "gwA", "lan", route="10.1.0.1"),
        Host("b1", "10.2.0.11", "gwB", "lan", route="10.2.0.1"),
        Host("b2", "10.2.0.12", "gwB", "lan", route="10.2.0.1"),
    )
}


class Net:
    """The internet of one test module; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self._prefix = f"tela{os.getpid()}n{next(_numbers)}"

    def __enter__(self) -> Net:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    # -- using it --------------------------------------------------------------------------------------------------

    def command(self, host: str, *argv: str) -> list[str]:
        """``argv`` to be run in ``host``; it becomes the process itself, so its pid is the command's."""
        return ["ip", "netns", "exec", self._namespace(host), *argv]

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and the threads and processes that it starts meanwhile, live in ``host``."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as home,
            Path("/run/netns", self._namespace(host)).open() as ns,
        ):
            _enter(ns.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def name_hosts(self, names: Mapping[str, str]) -> None:
        """From now on every host resolves these names, processes that run already included."""
        text = "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **names}.items())
        for host in HOSTS:
            # In place: `ip netns exec` has mounted this very file over /etc/hosts of what runs there.
            self._hosts_file(host).write_text(text)

    # -- faults ----------------------------------------------------------------------------------------------------

    def lose(self, host: str, percent: int) -> None:
        """Of what ``host`` receives."""
        device = HOSTS[host].device
        self._nft(host, f'add rule inet lab rx iifname "{device}" numgen random mod 100 < {percent} drop')

    def cut(self, host: str, address: str) -> None:
        """``host`` neither hears nor reaches ``address``; packets vanish."""
        self._nft(host, f"add rule inet lab rx ip saddr {address} drop")
        self._nft(host, f"add rule inet lab tx ip daddr {address} drop")

    def heal(self, host: str) -> None:
        """End losses and cuts of ``host``."""
        self._nft(host, "flush chain inet lab rx")
        self._nft(host, "flush chain inet lab tx")

    def close(self, gateway: str) -> None:
        """Nothing is forwarded out of a site any more; its gateway itself goes on to reach the world."""
        self._nft(gateway, "add rule inet fw closed drop")

    def open(self, gateway: str) -> None:
        """End of :meth:`close`."""
        self._nft(gateway, "flush chain inet fw closed")

    def block_udp(self, gateway: str) -> None:
        """Of what a site sends, TCP alone goes out; until :meth:`open`."""
        self._nft(gateway, "add rule inet fw closed meta l4proto udp drop")

    def map_ports_anew(self, gateway: str) -> None:
        """New connections leave from a port of chance each, as behind a symmetric NAT (RFC 5128 section 2.4)."""
        self._nft(gateway, 'flush chain ip nat post\nadd rule ip nat post oifname "wan" masquerade fully-random')

    def keep_ports(self, gateway: str) -> None:
        """End of :meth:`map_ports_anew`."""
        self._nft(gateway, 'flush chain ip nat post\nadd rule ip nat post oifname "wan" masquerade')

    def unplug(self, host: str) -> None:
        """Link down, carrier lost."""
        self._ip("-n", self._namespace(host), "link", "set", HOSTS[host].device, "down")

    def plug(self, host: str) -> None:
        """Link up again; the kernel forgot its route."""
        self._ip("-n", self._namespace(host), "link", "set", HOSTS[host].device, "up")
        self._route(HOSTS[host])

    def limit_rate(self, host: str, rate: str) -> None:
        """What ``host`` sends, such as 10mbit; with a queue of 200 ms, as cheap routers have."""
        namespace, device = self._namespace(host), HOSTS[host].device
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "32kbit",
             "latency", "200ms")  # fmt: skip

    def unlimit_rate(self, host: str) -> None:
        """End of :meth:`limit_rate`."""
        _run("tc", "-n", self._namespace(host), "qdisc", "del", "dev", HOSTS[host].device, "root")

    def move(self, host: str, old: str, new: str) -> None:
        """Another address for ``host``, in the same network."""
        namespace, device = self._namespace(host), HOSTS[host].device
        self._ip("-n", namespace, "addr", "del", f"{old}/24", "dev", device)
        self._ip("-n", namespace, "addr", "add", f"{new}/24", "dev", device)

    # -- making it -------------------------------------------------------------------------------------------------

    def _up(self) -> None:
        for name in ("inet", *HOSTS):
            self._ip("netns", "add", self._namespace(name))
            self._ip("-n", self._namespace(name), "link", "set", "lo", "up")
        self._bridge("inet", "br0")
        for host in HOSTS.values():
            self._wire(host)
            self._nft(host.name, _FAULT_RULES)
            self._hosts_file(host.name).parent.mkdir(parents=True)
        self.name_hosts({})

    def _wire(self, host: Host) -> None:
        """A cable from a host to its switch, its address, and what makes a gateway one."""
        namespace, switch, port = self._namespace(host.name), self._namespace(host.switch), f"p-{host.name}"
        self._ip("-n", namespace, "link", "add", host.device, "type", "veth", "peer", "name", port, "netns", switch)
        self._ip("-n", switch, "link", "set", port, "master", host.bridge, "up")
        self._ip("-n", namespace, "link", "set", host.device, "up")
        self._ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
        if host.name in GATEWAYS:
            self._bridge(host.name, "lan")
            self._ip("-n", namespace, "addr", "add", f"{GATEWAYS[host.name][1]}/24", "dev", "lan")
            _run(*self.command(host.name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
            self._nft(host.name, _GATEWAY_RULES)
        self._route(host)

    def _route(self, host: Host) -> None:
        if host.route:
            self._ip("-n", self._namespace(host.name), "route", "replace", "default", "via", host.route)

    def _bridge(self, host: str, name: str) -> None:
        self._ip("-n", self._namespace(host), "link", "add", name, "type", "bridge")
        self._ip("-n", self._namespace(host), "link", "set", name, "up")

    def _down(self) -> None:
        existing = {path.name for path in Path("/run/netns").glob(f"{self._prefix}-*")}
        for name in sorted(existing):
            self._ip("netns", "del", name)
        for host in HOSTS:
            shutil.rmtree(self._hosts_file(host).parent, ignore_errors=True)
        if _ETC.is_dir() and not any(_ETC.iterdir()):
            _ETC.rmdir()

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _hosts_file(self, host: str) -> Path:
        return _ETC / self._namespace(host) / "hosts"

    def _ip(self, *arguments: str) -> None:
        _run("ip", *arguments)

    def _nft(self, host: str, rules: str) -> None:
        _run(*self.command(host, "nft", "-f", "-"), text=rules)


def _run(*argv: str, text: str = "") -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} exited {done.returncode}: {done.stderr}{done.stdout}")


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace; the lab needs root")
