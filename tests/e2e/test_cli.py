"""Wrong input to real commands: one line, a remedy, the exit code of the table, and nothing left running."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.e2e.conftest import MODEL


def test_join_with_a_cut_invite_says_so(swarm: LocalSwarm) -> None:
    done = swarm.call("join", swarm.invite[:-9], "--name", "cut", "--", "vllm", "serve", "m")
    assert done.returncode == 2
    assert "incomplete or mistyped" in done.stderr
    assert "hint:" in done.stderr


def test_join_with_a_foreign_invite_is_refused_with_the_reason_on_both_sides(swarm: LocalSwarm) -> None:
    """Hub addresses of this swarm, but a token of another one: the hub must say no, and so must the log."""
    import msgspec

    from tela.net.invite import parse_invite, render_invite

    with LocalSwarm() as other:
        other.init()
        foreign = parse_invite(other.hub_invite)
    ours = parse_invite(swarm.invite)
    mixed = render_invite(msgspec.structs.replace(ours, token=foreign.token))
    done = swarm.call("join", mixed, "--name", "foreign", "--", "true", "--port", "1")
    assert done.returncode == 5, done.stderr
    assert "refused" in done.stderr
    for _ in poll(5, "the hub's log line"):
        if "admission.refuse" in swarm.daemons[0].text():
            break


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("join", "--nonsense"), 2, "--nonsense"),
        (("join", "no-invite", "--", "vllm", "serve", "m"), 2, "not an invite"),
        (("status", "--name", "nobody"), 3, "nobody"),
        (("wait", "--for", "serving", "--model", "other", "--timeout", "300ms", "--name", "hub"), 4, "other"),
    ],
)
def test_bad_input_exits_by_the_table(swarm: LocalSwarm, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = swarm.call(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_port_that_contradicts_the_argv_exits_at_once(swarm: LocalSwarm) -> None:
    done = swarm.call(
        "join",
        swarm.invite,
        "--name",
        "two-ports",
        "--engine-port",
        "5000",
        "--",
        "vllm",
        "serve",
        "m",
        "--port",
        "8080",
    )
    assert done.returncode == 2
    assert "5000" in done.stderr
    assert "8080" in done.stderr


def test_wait_returns_at_once_for_a_served_model(swarm: LocalSwarm) -> None:
    done = swarm.call("wait", "--for", "serving", "--model", MODEL, "--timeout", "30s", "--name", "hub")
    assert done.returncode == 0, done.stderr


def test_engine_that_fails_gives_its_exit_code(swarm: LocalSwarm) -> None:
    done = swarm.call("join", swarm.invite, "--name", "failing", "--", "sh", "-c", "echo words; exit 42", "{port}")
    assert done.returncode == 42, done.stderr
    assert "words" in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "tela: engine exited 42; exit code 42 is the engine's"


def test_replicas_of_hub_and_worker_agree_and_the_log_says_how_it_came(swarm: LocalSwarm, tmp_path: Path) -> None:
    dump = tmp_path / "hub.json"
    for _ in poll(5, "equal replicas"):  # a lease or a load report may be under way
        dump.write_text(swarm.call("registry", "dump", "--name", "hub", "--json").stdout)
        worker = swarm.daemons[1].name
        done = swarm.call("registry", "diff", str(dump), "--name", worker)
        if done.returncode == 0:
            break
    assert "the same" in done.stdout
    log = swarm.call("registry", "log", "--name", "hub")
    assert f"{MODEL} is ready" in log.stdout
