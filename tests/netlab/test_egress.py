"""A site whose nodes reach nothing but their gateway: out through a real squid, and through a real ssh -D."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.netlab.net import GATEWAYS, HUB_ADDRESS, Net
from tests.netlab.proxies import PASSWORD, SOCKS_PORT, SQUID_PORT, USER, squid, ssh_tunnel
from tests.netlab.swarm import HUB_NAME, HUB_PORT, MODEL, NetSwarm, failures, seconds_until

GATEWAY = GATEWAYS["gwA"][1]
SQUID_URL = f"http://{USER}:{PASSWORD}@{GATEWAY}:{SQUID_PORT}"
TOLD_LIMIT_S = 30.0
"""From the start of a process: 10 s for the reason, the rest for Python on a busy machine."""


@pytest.fixture(scope="module")
def swarm(net: Net) -> Iterator[NetSwarm]:
    with NetSwarm(net) as swarm:
        net.name_hosts({HUB_NAME: HUB_ADDRESS})
        net.close("gwA")
        swarm.init()
        swarm.start_public(advertise=HUB_NAME)
        yield swarm


def tells(swarm: NetSwarm, name: str, words: str) -> bool:
    warnings = swarm.look(name)["warnings"]
    return any(text.startswith("unreachable: no link to any member for ") and words in text for text in warnings)


def test_worker_behind_a_squid_serves(net: Net, swarm: NetSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    with squid(net, "gwA", GATEWAY, port=HUB_PORT) as log:
        monkeypatch.setitem(swarm.environment, "HTTPS_PROXY", SQUID_URL)
        worker = swarm.start_fake("a1-squid")
        swarm.wait_serving(MODEL, name="pub")
        assert failures(swarm.ask(10)) == []
        swarm.call("leave", "--name", "a1-squid")
        assert worker.wait() == 0
        written = log.read_text()
    assert f"CONNECT {HUB_NAME}:{HUB_PORT} {USER}" in written  # by name: the site needs no DNS for the outside
    assert PASSWORD not in worker.text()


def test_workers_without_a_way_out_tell_why(net: Net, swarm: NetSwarm) -> None:
    """The squid lets nobody but USER out, and to port 443 only."""
    cases = {
        "a1-password": (f"http://{USER}:wrong@{GATEWAY}:{SQUID_PORT}", "answered 407"),
        "a1-port": (SQUID_URL, "answered 403"),
        "a1-away": (f"socks5://{GATEWAY}:{SQUID_PORT + 1}", "cannot be reached"),
        "a1-kind": (f"socks5://{GATEWAY}:{SQUID_PORT}", "did not answer within 8 s"),
        "a1-direct": ("direct", "took longer than 10 s"),
    }
    with squid(net, "gwA", GATEWAY, port=443):
        workers = {name: swarm.start_fake(name, "--proxy", proxy) for name, (proxy, _) in cases.items()}
        for name, (_, words) in cases.items():
            told = partial(tells, swarm, name, words)
            seconds_until(told, f"{name} to tell that {words}", limit_s=TOLD_LIMIT_S)
            assert PASSWORD not in str(swarm.look(name))
    for name, worker in workers.items():
        swarm.call("leave", "--name", name)
        worker.wait()
        assert "node.isolated" in worker.text()
        assert PASSWORD not in worker.text()


def test_worker_behind_a_login_node_serves_through_ssh(net: Net, swarm: NetSwarm, tmp_path: Path) -> None:
    with ssh_tunnel(net, "a2", "gwA", GATEWAY, tmp_path):
        worker = swarm.start_fake("a2-ssh", "--proxy", f"socks5://127.0.0.1:{SOCKS_PORT}")
        swarm.wait_serving(MODEL, name="pub")
        assert failures(swarm.ask(10)) == []
        swarm.call("leave", "--name", "a2-ssh")
        assert worker.wait() == 0
