import http.client
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio

import tela
from tela.admin import claim_socket, serve_admin
from tela.errors import ConfigError, UsageError
from tela.views import parse_status
from tests.lab.backend import FakeBackend


@pytest.fixture
def path():
    """pytest's own directories are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory) / "worker.sock"


def ask(path, method, target, content=None):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(5)
    connection.sock.connect(str(path))
    connection.request(method, target, content)
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply, content


async def asked(path, method, target, content=None):
    return await trio.to_thread.run_sync(ask, path, method, target, content)


async def test_socket_file_goes_before_its_listener(path, monkeypatch):
    """Where nobody listens any more, the next daemon of this name may have put its own socket there."""
    close = trio.SocketListener.aclose
    was_there = []

    async def close_and_look(listener):
        was_there.append(path.exists())
        await close(listener)

    monkeypatch.setattr(trio.SocketListener, "aclose", close_and_look)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, FakeBackend())
        assert path.exists()
        nursery.cancel_scope.cancel()
    assert was_there == [False]


async def test_serve_admin_answers_each_route(path):
    backend = FakeBackend()
    backend.hubs = ("/ip4/192.0.2.1/tcp/4001/p2p/x",)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, backend)
        reply, content = await asked(path, "GET", "/status")
        assert (reply.status, parse_status(content)) == (200, backend.status())
        assert reply.headers["x-tela-version"] == tela.__version__
        assert reply.headers["content-type"] == "application/json"
        for target, status, expected in [
            ("/hubs", 200, {"hubs": ["/ip4/192.0.2.1/tcp/4001/p2p/x"]}),
            ("/health", 200, {"status": "ok"}),
            ("/ready", 200, {"status": "ready"}),
        ]:
            reply, content = await asked(path, "GET", target)
            assert (reply.status, msgspec.json.decode(content)) == (status, expected)
        reply, content = await asked(path, "GET", "/metrics?name[]=x")
        assert (reply.status, content) == (200, b"tela_links 1.0\n")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        nursery.cancel_scope.cancel()


async def test_drain_and_leave_reach_the_node(path):
    backend = FakeBackend()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, backend)
        assert (await asked(path, "POST", "/drain"))[0].status == 200
        assert backend.state == "drain"
        reply, _ = await asked(path, "GET", "/ready")
        assert reply.status == 503
        assert (await asked(path, "POST", "/leave"))[0].status == 202
        assert backend.left.is_set()
        nursery.cancel_scope.cancel()


async def test_revocations_are_taken_in_and_shown(path):
    backend = FakeBackend()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, backend)
        reply, content = await asked(path, "GET", "/revocations")
        assert (reply.status, content) == (200, b"")
        assert (await asked(path, "POST", "/revocations", b"a list"))[0].status == 200
        reply, content = await asked(path, "GET", "/revocations")
        assert (content, reply.headers["content-type"]) == (b"a list", "application/octet-stream")
        backend.is_refusing = True
        reply, content = await asked(path, "POST", "/revocations", b"another")
        assert (reply.status, msgspec.json.decode(content)["error"]["code"]) == (400, "protocol")
        assert backend.revoked == b"a list"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/", 404),
        ("GET", "/leave", 405),
        ("POST", "/status", 405),
        ("DELETE", "/drain", 405),
        ("DELETE", "/revocations", 405),
    ],
)
async def test_other_requests_change_nothing(path, method, target, status):
    backend = FakeBackend()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, backend)
        reply, content = await asked(path, method, target)
        assert reply.status == status
        assert "code" in msgspec.json.decode(content)["error"]
        assert backend.state == "serving"
        nursery.cancel_scope.cancel()


async def test_socket_is_its_owners_and_goes_with_the_server(path):
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, FakeBackend())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_second_daemon_of_a_name_is_refused_and_the_first_goes_on(path):
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_admin, path, FakeBackend())
        with pytest.raises(UsageError) as error:
            await trio.to_thread.run_sync(claim_socket, path)
        assert f"pid {os.getpid()}" in str(error.value)
        assert "--name" in error.value.hint
        assert (await asked(path, "GET", "/health"))[0].status == 200
        nursery.cancel_scope.cancel()


def test_claim_socket_replaces_that_of_a_killed_daemon(path):
    program = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert path.exists()
    with claim_socket(path) as listener:
        assert listener.getsockname() == str(path)


def test_claim_socket_of_many_starters_gives_it_to_one(path):
    program = (
        "import sys; from pathlib import Path; from tela.admin import claim_socket\n"
        "from tela.errors import UsageError\n"
        "try:\n    listener = claim_socket(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()\n"
        "except UsageError:\n    print('refused', flush=True)\n"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = sorted(starter.stdout.readline().strip() for starter in starters)
    for starter in starters:
        starter.communicate()
    assert said == ["mine", "refused", "refused"]


def test_claim_socket_where_no_socket_can_be_is_a_config_error(path):
    with pytest.raises(ConfigError, match="cannot make the control socket"):
        claim_socket(path.parent / "missing" / "x.sock")
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot make the control socket"):
        claim_socket(path)
