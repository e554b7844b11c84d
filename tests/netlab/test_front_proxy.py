"""A hub behind a real nginx with TLS: sites reach it by WebSocket on 443, one of them through a real squid as well."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.demo.local_swarm import poll
from tests.netlab.net import GATEWAYS, HUB_ADDRESS, Net
from tests.netlab.proxies import PASSWORD, SQUID_PORT, USER, nginx, squid
from tests.netlab.swarm import HUB_NAME, MODEL, NetSwarm, failures, seconds_until

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "front-proxy.md"
GATEWAY = GATEWAYS["gwA"][1]


def certify(folder: Path) -> None:
    """A CA of our own and its certificate for the hub's name."""
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    for command in (
        [*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=lab"],
        [*new, "-keyout", "hub.key", "-out", "hub.pem", "-subj", f"/CN={HUB_NAME}", "-CA", "ca.pem", "-CAkey", "ca.key",
         "-addext", f"subjectAltName=DNS:{HUB_NAME}", "-addext", "basicConstraints=critical,CA:FALSE"],
    ):  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def documented_server(folder: Path) -> str:
    """The server block of the how-to, with the lab's name and files."""
    found = re.search(r"```nginx\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    assert found is not None
    text = found.group(1).replace("/etc/ssl/hub.example.org", str(folder / "hub"))
    return text.replace("hub.example.org", HUB_NAME)


@pytest.fixture(scope="module")
def swarm(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetSwarm]:
    folder = tmp_path_factory.mktemp("front")
    certify(folder)
    net.name_hosts({HUB_NAME: HUB_ADDRESS})
    with NetSwarm(net) as swarm, nginx(net, "pub", HUB_ADDRESS, folder, documented_server(folder)):
        swarm.environment["SSL_CERT_FILE"] = str(folder / "ca.pem")
        swarm.init()
        listen, advertise = ("--listen", "ws://127.0.0.1:4080"), ("--advertise", f"wss://{HUB_NAME}")
        options = ("--hub", "--http", "127.0.0.1:8080", *listen, *advertise)
        swarm.base_url = swarm.wait_status(swarm.start("pub", "ingress", *options, invite=swarm.hub_invite))["base_url"]
        swarm.invite = swarm.answer("invite", "create", "--uses", "9")["invite"]
        yield swarm


def hub_as_seen_by(swarm: NetSwarm, name: str) -> dict[str, str]:
    return next(view for view in swarm.look(name)["nodes"] if view["name"] == "pub")


def test_site_reaches_the_hub_by_websocket_alone(swarm: NetSwarm) -> None:
    swarm.start_fake("b1")
    swarm.wait_serving(MODEL, name="pub")
    assert failures(swarm.ask(20)) == []
    assert hub_as_seen_by(swarm, "b1")["path"] == "direct"
    seconds_until(lambda: "/tls/ws/" in hub_as_seen_by(swarm, "b1")["address"], "the hub's address", limit_s=10)
    seconds_until(lambda: swarm.look("pub")["reach"]["kind"] == "direct", "a dial-back through nginx", limit_s=10)
    swarm.call("leave", "--name", "b1")


def test_site_behind_a_squid_that_lets_443_out_reaches_it_too(
    net: Net, swarm: NetSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    net.close("gwA")
    with squid(net, "gwA", GATEWAY, port=443) as log:
        monkeypatch.setitem(swarm.environment, "HTTPS_PROXY", f"http://{USER}:{PASSWORD}@{GATEWAY}:{SQUID_PORT}")
        worker = swarm.start_fake("a1")
        swarm.wait_serving(MODEL, name="pub")
        assert failures(swarm.ask(10)) == []
        swarm.call("leave", "--name", "a1")
        assert worker.wait() == 0
        written = log.read_text()
    assert f"CONNECT {HUB_NAME}:443 {USER}" in written


def test_certificate_that_is_not_trusted_is_told(swarm: NetSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(swarm.environment, "SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    swarm.start_fake("b2")
    for _ in poll(30, "the reason"):
        if "CERTIFICATE_VERIFY_FAILED" in swarm.call("status", "--name", "b2").stdout:
            break
