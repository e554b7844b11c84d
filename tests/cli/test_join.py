import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tela.cli.main import run
from tela.errors import RefusedError
from tela.identity import Issuer, KeyPair, issue_issuer
from tela.net.invite import Invite, parse_invite, render_invite
from tela.record import SwarmId

NOW = 1_800_000_000
CA, ISSUING = (KeyPair(bytes([n]) * 32) for n in (1, 2))
ISSUER = Issuer(
    ISSUING, issue_issuer(CA, swarm=SwarmId(b"s" * 16), issuer=ISSUING.public, provider="eth", now=NOW, days=9)
)
TOKEN = ISSUER.token(zone="z", region="r", roles=("worker",), now=NOW, expires_s=60, uses=1)
LINE = render_invite(Invite(SwarmId(b"s" * 16), CA.public, (), TOKEN))

ENGINE = ("engine", "--on", "{port}")


@pytest.fixture
def node(monkeypatch):
    """A node that only keeps its options; ``code`` is its exit code."""
    node = SimpleNamespace(code=0, options=None, level=None)

    def run_node(options):
        node.options = options
        if isinstance(node.code, Exception):
            raise node.code
        return node.code

    monkeypatch.setitem(sys.modules, "tela.node", SimpleNamespace(run_node=run_node))
    monkeypatch.setattr("tela.observe.configure", lambda level: setattr(node, "level", level))
    return node


@pytest.mark.parametrize(
    "argv",
    [
        ("vllm", "serve", "M", "--port", "{port}"),
        ("sh", "-c", "echo 'a b' \"$X\" && exit 3", "{port}"),
        ("engine", "{port}", "--", "--name", "x", "--help"),
        ("engine", "--json", "-v", "", "{port}"),
        ("--odd-name", "{port}"),
    ],
    ids=lambda argv: argv[0],
)
def test_join_passes_the_engines_argv_untouched(node, argv):
    assert run(["join", LINE, "--name", "w", "--", *argv]) == 0
    assert node.options.engine.argv == argv
    assert node.options.name == "w"


def test_join_without_options_uses_defaults(node, place, tmp_path):
    assert run(["join", LINE, "--", *ENGINE]) == 0
    options = node.options
    assert (options.name, options.role, options.is_hub, options.listen) == ("worker", "worker", False, ())
    assert options.invite == parse_invite(LINE)
    assert options.paths.socket == place / "worker.sock"
    assert options.paths.node_dir == tmp_path / "state/nodes/worker"
    assert (options.engine.engine_port, options.engine.is_canary, options.engine.restart) == (None, True, 0)
    assert (options.drain_s, options.warnings, node.level) == (20.0, (), "info")


def test_join_takes_every_option(node, tmp_path):
    flags = "--iface eth0 --exclude-cidr 10.0.0.0/8 "
    flags += "--name w --listen 0.0.0.0:1 --listen [::]:2 --advertise 192.0.2.1:1 --drain 2m -v --engine-port 8000"
    more = "--health-path /up --models-path /m --no-canary --start-timeout 1h --restart 2"
    run(["join", LINE, *flags.split(), *more.split(), "--state-dir", str(tmp_path / "s"), "--", *ENGINE])
    options, engine = node.options, node.options.engine
    assert options.choice == (("eth0",), ("10.0.0.0/8",))
    assert (options.listen, options.advertise) == (("0.0.0.0:1", "[::]:2"), ("192.0.2.1:1",))
    assert (options.drain_s, options.paths.state_dir, node.level) == (120.0, tmp_path / "s", "debug")
    assert (engine.engine_port, engine.health_path, engine.models_path) == (8000, "/up", "/m")
    assert (engine.is_canary, engine.start_timeout_s, engine.restart) == (False, 3600.0, 2)


def test_flags_win_over_environment_and_files(node, tmp_path, monkeypatch):
    (tmp_path / "tela.toml").write_text('name = "file"\ndrain = "1s"\n[engine]\nrestart = 1\n')
    monkeypatch.setenv("TELA_DRAIN", "2s")
    monkeypatch.setenv("TELA_ENGINE__RESTART", "2")
    run(["join", LINE, "--restart", "0", "--", *ENGINE])
    assert (node.options.name, node.options.drain_s, node.options.engine.restart) == ("file", 2.0, 0)


def test_proxies_come_from_the_flag_or_the_environment(node, monkeypatch, capsys):
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    monkeypatch.setenv("https_proxy", "http://u:secret@ambient.example:3128")
    run(["join", LINE, "--", *ENGINE])
    assert str(node.options.proxies.ambient) == "http://ambient.example:3128"
    run(["join", LINE, "--proxy", "socks5://127.0.0.1:1080", "--", *ENGINE])
    assert str(node.options.proxies.chosen) == "socks5://127.0.0.1:1080"
    assert node.options.proxies.ambient is None
    assert node.options.proxies.exempt == ("10.0.0.0/8",)
    monkeypatch.setenv("https_proxy", "https://u:secret@ambient.example")
    run(["ingress", LINE])
    assert any("HTTPS_PROXY is ignored" in warning for warning in node.options.warnings)
    assert "secret" not in f"{node.options}{capsys.readouterr().err}"


def test_unknown_variable_is_told_and_shown_by_status(node, monkeypatch, capsys):
    monkeypatch.setenv("TELA_DRAIM", "2s")
    run(["join", LINE, "--", *ENGINE])
    assert "TELA_DRAIM" in capsys.readouterr().err
    assert any("TELA_DRAIM" in warning for warning in node.options.warnings)


def test_daemon_without_a_home_runs_with_one_warning(node, monkeypatch, capsys):
    for variable in ("TELA_STATE_DIR", "HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "SLURM_TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "a" * 150)
    run(["join", LINE, "--", *ENGINE])
    assert len(os.fsencode(node.options.paths.socket)) <= 100
    assert capsys.readouterr().err.count("warning: ") == 1
    Path("/tmp/" + "a" * 150, f"tela-{os.geteuid()}").rmdir()
    Path("/tmp/" + "a" * 150).rmdir()


def test_ingress_is_a_hub_only_where_asked(node):
    run(["ingress", LINE])
    assert (node.options.role, node.options.is_hub, node.options.listen) == ("ingress", False, ())
    assert (node.options.engine, node.options.http) == (None, "127.0.0.1:8080")
    run(["ingress", "--hub", "--http", "0.0.0.0:80", LINE])
    assert (node.options.is_hub, node.options.listen, node.options.http) == (True, ("0.0.0.0:4001",), "0.0.0.0:80")


def test_hub_without_clients_needs_no_engine(node):
    assert run(["join", LINE, "--role", "hub", "--listen", "127.0.0.1:0"]) == 0
    assert (node.options.role, node.options.is_hub, node.options.engine) == ("hub", True, None)
    assert node.options.listen == ("127.0.0.1:0",)


@pytest.mark.parametrize("code", [0, 1, 70, 137])
def test_join_ends_with_the_nodes_code(node, code):
    node.code = code
    assert run(["join", LINE, "--", *ENGINE]) == code


def test_refused_node_exits_5_with_the_reason(node, capsys):
    node.code = RefusedError("the invite expired 9 s ago", code="expired", hint="ask for a new invite")
    assert run(["join", LINE, "--", *ENGINE]) == 5
    assert capsys.readouterr().err.endswith("tela: error: the invite expired 9 s ago\n  hint: ask for a new invite\n")


@pytest.mark.parametrize("source", ["argument", "file", "@file", "stdin", "variable", "file in variable"])
def test_invite_comes_from_where_it_is(node, tmp_path, monkeypatch, source):
    file = tmp_path / "worker.invite"
    file.write_text(LINE + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(LINE + "\n"))
    arguments = {"argument": [LINE], "file": ["worker.invite"], "@file": [f"@{file}"], "stdin": ["-"]}.get(source, [])
    if "variable" in source:
        monkeypatch.setenv("TELA_INVITE", LINE if source == "variable" else str(file))
    assert run(["join", *arguments, "--", *ENGINE]) == 0
    assert node.options.invite == parse_invite(LINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "--", *ENGINE], "no invite"),
        (["join", "worker.invit", "--", *ENGINE], "'worker.invit' is not an invite"),
        (["join", "@" + LINE, "--", *ENGINE], "is not an invite"),
        (["join", ".", "--", *ENGINE], "Is a directory"),
        (["join", LINE[:-9], "--", *ENGINE], "incomplete or mistyped"),
        (["join", LINE], "no engine command"),
        (["join", LINE, "--"], "no engine command"),
        (["join", LINE, "vllm", "serve"], "vllm"),
        (["join", LINE, "--role", "hub", "--", *ENGINE], "a hub runs no engine"),
        (["join", LINE, "--role", "king", "--", *ENGINE], "king"),
        (["join", LINE, "--name", "a/b", "--", *ENGINE], "'a/b' cannot be a name"),
        (["join", LINE, "--drain", "soon", "--", *ENGINE], "'soon' is no duration"),
        (["join", LINE, "--listen", "4001", "--", *ENGINE], "listen: '4001' is no address"),
        (["join", LINE, "--engine-port", "99999", "--", *ENGINE], "port: 99999"),
        (["join", LINE, "--proxy", "ftp://u:p@h:1", "--", *ENGINE], "proxy: proxies of kind 'ftp' are not known"),
        (["ingress", LINE, "--http", "8080"], "http: '8080' is no address"),
        (["ingress", LINE, "--", *ENGINE], "engine"),
    ],
)
def test_wrong_command_line_starts_nothing(node, arguments, words, capsys):
    assert run(arguments) == 2
    assert node.options is None
    error = capsys.readouterr().err
    assert error.startswith("tela: error: ")
    assert words in error.splitlines()[0]


def test_engine_command_that_cannot_work_is_told_before_the_node_is_loaded(node, capsys):
    assert run(["join", LINE, "--engine-port", "5000", "--", "vllm", "serve", "m", "--port", "8080"]) == 2
    assert node.options is None
    assert {"5000", "8080"} <= set(capsys.readouterr().err.replace("\n", " ").split())
