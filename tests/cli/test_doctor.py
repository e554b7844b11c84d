import json
import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tela.cli import checks
from tela.cli.checks import (
    check_clock,
    check_interfaces,
    check_libp2p,
    check_open_files,
    check_proxies,
    check_python,
    check_settings,
    check_socket,
    check_state,
    check_tmpdir,
    file_system_of,
)
from tela.cli.main import run
from tela.config import Settings
from tela.net.addresses import Interface
from tela.net.endpoints import Choice

MOUNTS = """/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
home:/export /home nfs4 rw 0 0
scratch /scratch\\040disk lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("version", "verdict"),
    [(("3", "11", "7"), "ok"), (("3", "13", "0"), "ok"), (("3", "14", "0"), "warn"), (("3", "10", "1"), "warn")],
)
def test_check_python(version, verdict):
    assert check_python(version).verdict == verdict


def test_check_libp2p_looks_for_a_compiler_only_where_it_is_missing():
    assert [check.name for check in check_libp2p(lambda _: "0.8.1")] == ["libp2p"]
    missing = list(check_libp2p(lambda _: None))
    assert [(check.name, check.verdict) for check in missing] == [
        ("libp2p", "fail"),
        ("compiler", "info"),
        ("gmp.h", "info"),
    ]
    assert missing[0].fix


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/u/.local", "nfs4"),
        ("/tmp/x", "tmpfs"),
        ("/", "ext4"),
        ("/homely", "ext4"),
        ("/scratch disk/u", "lustre"),
    ],
)
def test_file_system_of_takes_the_deepest_mount(path, kind):
    assert file_system_of(Path(path), MOUNTS) == kind
    assert file_system_of(Path(path), "") == "unknown"


def test_check_state_warns_of_a_shared_file_system(tmp_path, monkeypatch):
    environ = {"TELA_STATE_DIR": str(tmp_path)}
    assert [check.verdict for check in check_state(environ)] == ["ok"]
    monkeypatch.setattr(checks, "file_system_of", lambda path, mounts: "lustre")
    (check,) = check_state(environ)
    assert (check.verdict, "TELA_STATE_DIR" in check.fix) == ("warn", True)


def test_check_state_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").touch()
    (check,) = check_state({"TELA_STATE_DIR": str(tmp_path / "file")})
    assert check.verdict == "fail"
    assert check.fix


def test_check_socket_is_ok_even_under_a_long_runtime_dir(place):
    assert check_socket({"TELA_RUNTIME_DIR": str(place)}).verdict == "ok"
    assert check_socket({"TELA_RUNTIME_DIR": "/tmp/" + "a" * 150}).verdict == "ok"


@pytest.mark.parametrize(("length", "verdict"), [(4, "ok"), (60, "ok"), (61, "warn")])
def test_check_tmpdir(length, verdict):
    assert check_tmpdir("/" * length).verdict == verdict


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "fix"),
    [
        (256, 1_000_000, "fail", "ulimit -n 4096"),
        (1024, 2048, "warn", "ulimit -n 2048"),
        (1024, 1024, "warn", "ask the administrator"),
        (1024, resource.RLIM_INFINITY, "warn", "ulimit -n 4096"),
        (4096, 4096, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
    ],
)
def test_check_open_files(soft, hard, verdict, fix):
    check = check_open_files(soft, hard)
    assert (check.verdict, check.fix) == (verdict, fix)


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({}, "ok"),
        ({"https_proxy": "http://p:1"}, "ok"),
        ({"http_proxy": "http://p:1"}, "warn"),
        ({"HTTP_PROXY": "http://p:1", "no_proxy": "localhost, 127.0.0.1"}, "ok"),
        ({"ALL_PROXY": "socks://p:1", "NO_PROXY": "*"}, "ok"),
        ({"http_proxy": "http://p:1", "no_proxy": "example.org"}, "warn"),
    ],
)
def test_check_proxies(environ, verdict):
    assert check_proxies(environ).verdict == verdict


@pytest.mark.parametrize(("year", "verdict"), [(1970, "fail"), (2027, "ok"), (2150, "fail")])
def test_check_clock(year, verdict):
    assert check_clock(datetime(year, 1, 1, tzinfo=UTC)).verdict == verdict


def test_check_interfaces_knows_what_the_user_chose():
    interfaces = [Interface("eth0", "10.1.2.3", True), Interface("ib0", "10.2.2.3", True)]
    checks = check_interfaces(interfaces, Choice(("eth0", "ib1"), ("10.1.0.0/16",)))
    assert [(check.name, check.verdict, check.why) for check in checks] == [
        ("interface ib1", "fail", "is chosen and has no address here"),
        ("interface eth0", "info", "10.1.2.3: excluded with --exclude-cidr"),
        ("interface ib0", "info", "10.2.2.3: not chosen with --iface"),
    ]
    (check,) = check_interfaces(interfaces[:1], Choice())
    assert check.why == "10.1.2.3: would be announced"


def test_settings_that_cannot_be_read_are_found():
    assert check_settings({})[1].verdict == "ok"
    settings, check = check_settings({"TELA_EXCLUDE_CIDR": "10.0.0.0/33"})
    assert (settings, check.verdict) == (Settings(), "fail")
    assert "exclude_cidr" in check.why
    assert check_settings({"TELA_IFCE": "eth0"})[1].verdict == "warn"


def test_doctor_prints_a_line_per_check(capsys):
    assert run(["doctor"]) in {0, 1}
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} <= {"ok", "warn", "fail", "info"}
    assert len(lines) >= 9


def test_doctor_fails_where_a_check_fails(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TELA_STATE_DIR", str(tmp_path / "file"))
    assert run(["doctor", "--json"]) == 1
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["schema_version"] == 1
    assert [check["name"] for check in diagnosis["checks"] if check["verdict"] == "fail"] == ["state"]
