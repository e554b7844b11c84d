"""A real squid, nginx and ssh -D on hosts of the network lab, each a process of its own with its files in a folder."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.demo.local_swarm import poll
from tests.netlab.net import Net

START_LIMIT_S = 20.0
SQUID_PORT = 3128
SSH_PORT = 2222
SOCKS_PORT = 1080
USER, PASSWORD = "worker", "s3cret-of-squid"
_NCSA_AUTH = "/usr/lib/squid/basic_ncsa_auth"
_PRIVILEGE_SEPARATION = Path("/run/sshd")
"""sshd insists on it; its package makes it only when the service starts."""


@contextmanager
def squid(net: Net, host: str, address: str, *, port: int) -> Iterator[Path]:
    """An HTTP proxy that lets USER go to ``port`` by CONNECT and no further; yields its access log."""
    with tempfile.TemporaryDirectory(prefix="tela-squid-") as name:  # not pytest's, whose parents are root's alone
        yield from _squid(net, host, address, Path(name), port)


def _squid(net: Net, host: str, address: str, folder: Path, port: int) -> Iterator[Path]:
    log, users, configuration = folder / "access.log", folder / "users", folder / "squid.conf"
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", PASSWORD], capture_output=True, text=True, check=True
    ).stdout.strip()
    users.write_text(f"{USER}:{hashed}\n")
    configuration.write_text(
        f"""
visible_hostname squid.example
http_port {address}:{SQUID_PORT}
auth_param basic program {_NCSA_AUTH} {users}
auth_param basic children 1
acl known proxy_auth REQUIRED
acl tunnels port {port}
http_access allow CONNECT known tunnels
http_access deny all
access_log stdio:{log}
cache_log {folder}/cache.log
pid_filename none
cache deny all
coredump_dir {folder}
shutdown_lifetime 0 seconds
pinger_enable off
netdb_filename none
"""
    )
    for path in (folder, users, configuration):
        shutil.chown(path, "proxy")  # squid gives up root
    command = net.command(host, "squid", "-N", "-f", str(configuration))
    with _running(command, folder / "squid.out"):
        _wait_listening(net, host, address, SQUID_PORT)
        yield log


@contextmanager
def ssh_tunnel(net: Net, client: str, server: str, address: str, folder: Path) -> Iterator[None]:
    """SOCKS5 on loopback of ``client``, out of ``server`` by a real ssh -D to a real sshd."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "known").write_text(f"[{address}]:{SSH_PORT} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"""
ListenAddress {address}:{SSH_PORT}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
AllowTcpForwarding yes
"""
    )
    login = [
        "ssh",
        "-F",
        "none",
        "-N",
        "-D",
        f"127.0.0.1:{SOCKS_PORT}",
        "-p",
        str(SSH_PORT),
        "-i",
        str(folder / "user"),
    ]
    options = ["BatchMode=yes", "IdentitiesOnly=yes", "ExitOnForwardFailure=yes", "StrictHostKeyChecking=yes"]
    options.append(f"UserKnownHostsFile={folder}/known")
    login += [argument for option in options for argument in ("-o", option)]
    daemon = net.command(server, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config"))
    with _privilege_separation(), _running(daemon, folder / "sshd.out"):
        _wait_listening(net, client, address, SSH_PORT)
        with _running(net.command(client, *login, f"root@{address}"), folder / "ssh.out"):
            _wait_listening(net, client, "127.0.0.1", SOCKS_PORT)
            yield


@contextmanager
def nginx(net: Net, host: str, address: str, folder: Path, server: str) -> Iterator[None]:
    """A web server on port 443 of ``host`` with this server block."""
    configuration = folder / "nginx.conf"
    places = "".join(f"{kind}_temp_path {folder};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    configuration.write_text(
        f"daemon off; user root; pid {folder}/nginx.pid; error_log stderr; worker_processes 1;\n"
        f"events {{}}\nhttp {{ access_log off;\n{places}{server}}}\n"
    )
    with _running(net.command(host, "nginx", "-e", "stderr", "-c", str(configuration)), folder / "nginx.out"):
        _wait_listening(net, host, address, 443)
        yield


@contextmanager
def _running(command: list[str], output: Path) -> Iterator[None]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    except TimeoutError as error:
        raise RuntimeError(f"{' '.join(command)}:\n{output.read_text(errors='replace')[-2000:]}") from error
    finally:
        process.terminate()
        try:
            process.wait(START_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _privilege_separation() -> Iterator[None]:
    is_ours = not _PRIVILEGE_SEPARATION.exists()
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    try:
        yield
    finally:
        if is_ours:
            _PRIVILEGE_SEPARATION.rmdir()


def _wait_listening(net: Net, host: str, address: str, port: int) -> None:
    with net.inside(host):
        for _ in poll(START_LIMIT_S, f"{address}:{port} to listen"):
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                return
