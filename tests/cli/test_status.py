import json
import socket
from types import SimpleNamespace

import msgspec
import pytest

from tela.cli.main import run
from tela.views import CandidateView, Report, RouteView
from tests.cli.conftest import serving
from tests.lab.backend import FakeBackend


def test_status_shows_daemon_nodes_models_and_warnings(place, capsys):
    with serving(place, FakeBackend("w1")):
        assert run(["status"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split() == ["DAEMON", "NODE", "SWARM", "ROLES", "STATE", "BASE", "URL", "UP"]
    assert lines[1].split() == ["w1", "a1b2c3d4", "00112233", "worker", "serving", "http://127.0.0.1:8080/v1", "3m12s"]
    assert "4x NVIDIA H200 151 GB" in output.out
    assert "tiny" in output.out
    assert "1/2" in output.out
    assert lines[-1] == "warning: the clock of ffffffff is 400 s off"
    assert "next: point an OpenAI client at http://127.0.0.1:8080/v1" in output.err


def test_status_lets_no_peer_write_to_the_terminal(place, capsys):
    with serving(place, FakeBackend()):
        run(["status"])
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "evil?[2J?name" in output


def test_status_json_is_one_object_whatever_runs(place, capsys):
    one, two = FakeBackend("one"), FakeBackend("two")
    with serving(place, one, two):
        assert run(["status", "--json"]) == 0
        both = msgspec.json.decode(capsys.readouterr().out, type=Report)
        assert run(["status", "--json", "--name", "two"]) == 0
        single = json.loads(capsys.readouterr().out)
    assert both == Report(daemons=(one.status(), two.status()))
    assert [daemon["name"] for daemon in single["daemons"]] == ["two"]
    assert single["schema_version"] == 1


def test_status_passes_over_sockets_of_dead_daemons(place, capsys):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place / "dead.sock"))
    assert run(["status"]) == 3
    assert run(["status", "--name", "dead"]) == 3
    with serving(place, FakeBackend("alive")):
        assert run(["status"]) == 0
    output = capsys.readouterr()
    assert "alive" in output.out
    assert "dead" not in output.out


def test_status_of_a_name_that_does_not_run_tells_those_that_do(place, capsys):
    with serving(place, FakeBackend("one")):
        assert run(["status", "--name", "two"]) == 3
    assert "running: one" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["flag", "variable", "neither"])
def test_status_colours_states_on_a_terminal_only_where_wanted(place, capsys, monkeypatch, how):
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda stream, color: color is False)  # as on a terminal
    if how == "variable":
        monkeypatch.setenv("NO_COLOR", "1")
    with serving(place, FakeBackend()):
        run(["status", *(["--no-color"] if how == "flag" else [])])
    assert ("\x1b[32m" in capsys.readouterr().out) is (how == "neither")


def test_status_of_another_version_warns_once(place, capsys, monkeypatch):
    monkeypatch.setattr("tela.admin.tela", SimpleNamespace(__version__="9.9"))
    with serving(place, FakeBackend("one")):
        run(["status"])
        run(["status"])
    assert capsys.readouterr().err.count("warning: daemon one runs tela 9.9") == 1


def test_daemon_that_hangs_does_not_hide_the_others(place, capsys, monkeypatch):
    monkeypatch.setattr("tela.cli.client.Daemon.request.__kwdefaults__", {"content": b"", "timeout_s": 0.2})
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(place / "hung.sock"))
        hung.listen()
        assert run(["status"]) == 4
        with serving(place, FakeBackend("well")):
            assert run(["status"]) == 0
    output = capsys.readouterr()
    assert "well" in output.out
    assert "warning: daemon hung did not answer" in output.err


def test_metrics_are_printed_as_they_are(place, capsys):
    with serving(place, FakeBackend()):
        assert run(["metrics"]) == 0
    assert capsys.readouterr().out == "tela_links 1.0\n"


@pytest.mark.parametrize("arguments", [[], ["--model", "tiny"], ["--model", "tiny", "--replicas", "1"]], ids=" ".join)
def test_wait_ends_at_once_where_the_condition_holds(place, arguments, capsys):
    with serving(place, FakeBackend()):
        assert run(["wait", "--for", "serving", *arguments]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--model", "tiny", "--replicas", "2"], "1 of 2 replicas are ready"),
        (["--model", "other"], "model other is not serving"),
        (["--name", "absent"], "no daemon called absent"),
    ],
)
def test_wait_gives_up_with_what_it_saw(place, arguments, seen, capsys):
    with serving(place, FakeBackend()):
        assert run(["wait", "--timeout", "0", *arguments]) == 4
    assert seen in capsys.readouterr().err


def test_wait_for_a_daemon_that_is_loading_goes_on_until_it_serves(place, monkeypatch):
    backend = FakeBackend(state="join")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        backend.state = "serving"

    monkeypatch.setattr("tela.cli.status.time.sleep", nap)
    with serving(place, backend):
        assert run(["wait", "--timeout", "60s"]) == 0
    assert len(naps) == 1


def test_drain_and_leave_of_the_only_daemon(place, capsys):
    backend = FakeBackend("w1")
    with serving(place, backend):
        assert run(["drain"]) == 0
        assert backend.state == "drain"
        assert run(["leave"]) == 0
        assert backend.state == "left"
        assert not (place / "w1.sock").exists()
    output = capsys.readouterr()
    assert output.out.splitlines() == ["w1 is draining", "w1 has left"]
    assert "next: tela leave --name w1" in output.err


@pytest.mark.parametrize("command", ["drain", "leave"])
def test_drain_and_leave_of_several_need_a_name(place, command, capsys):
    one, two = FakeBackend("one"), FakeBackend("two")
    with serving(place, one, two):
        assert run([command]) == 2
        assert (one.state, two.state) == ("serving", "serving")
        assert run([command, "--name", "two"]) == 0
        assert one.state == "serving"
    assert "--name: one, two" in capsys.readouterr().err


def test_leave_that_takes_too_long_says_so(place, capsys, monkeypatch):
    backend = FakeBackend()

    async def stay():
        backend.state = "drain"

    backend.leave = stay
    with serving(place, backend):
        assert run(["leave", "--timeout", "300ms"]) == 4
    assert "still stopping" in capsys.readouterr().err


def candidate(node, reason, provider="eth"):
    return CandidateView(
        node=node,
        name="evil\x1b[2J",
        provider=provider,
        zone="euler",
        instance=0,
        kind="vllm",
        status="serving",
        is_fit=reason == "ok",
        reason=reason,
    )


def test_status_as_routed_shows_who_would_answer_and_why_not_others(place, capsys):
    backend = FakeBackend()
    backend.candidates = (candidate("aa", "ok"), candidate("bb", "draining", "mit"))
    with serving(place, backend):
        assert run(["status", "--as-routed", "a model/1&2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert run(["status", "--as-routed", "a model/1&2", "--provider", "mit", "--json"]) == 1
        route = msgspec.json.decode(capsys.readouterr().out, type=RouteView)
    assert [line.split()[-1] for line in lines] == ["ROUTED", "ok", "draining"]
    assert "\x1b" not in lines[1]
    assert (route.model, [one.node for one in route.candidates]) == ("a model/1&2", ["bb"])


def test_status_as_routed_by_a_daemon_that_is_no_ingress_says_so(place, capsys):
    backend = FakeBackend()
    backend.is_refusing = True
    with serving(place, backend):
        assert run(["status", "--as-routed", "tiny"]) == 1
    assert "no ingress" in capsys.readouterr().err
    assert run(["status", "--provider", "eth"]) == 2


def test_status_watch_prints_an_object_a_line_until_interrupted(place, capsys, monkeypatch):
    rounds = iter((None, None))

    def sleep(_seconds):
        if next(rounds, True):
            raise KeyboardInterrupt

    monkeypatch.setattr("tela.cli.status.time", SimpleNamespace(sleep=sleep))
    with serving(place, FakeBackend()):
        assert run(["status", "--watch", "1s", "--json"]) == 130
    assert len([msgspec.json.decode(line, type=Report) for line in capsys.readouterr().out.splitlines()]) == 3
