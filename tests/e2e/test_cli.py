"""Wrong input to real commands: one line, a remedy, the exit code of the table, and nothing left running."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tela.net.invite import parse_invite, render_invite
from tests.e2e.conftest import MODEL


def test_join_with_a_cut_invite_says_so(swarm: LocalSwarm) -> None:
    done = swarm.call("join", swarm.invite[:-9], "--name", "cut", "--", "vllm", "serve", "m")
    assert done.returncode == 2
    assert "incomplete or mistyped" in done.stderr
    assert "hint:" in done.stderr


def foreign(swarm: LocalSwarm) -> str:
    """Hub addresses of this swarm, but a token of another one."""
    with LocalSwarm() as other:
        other.init()
        token = parse_invite(other.hub_invite).token
    return render_invite(msgspec.structs.replace(parse_invite(swarm.invite), token=token))


def altered(swarm: LocalSwarm) -> str:
    """A worker's invite that was made one for hubs."""
    invite = parse_invite(swarm.invite)
    return render_invite(
        msgspec.structs.replace(invite, token=msgspec.structs.replace(invite.token, roles=("worker", "hub")))
    )


def used_up(swarm: LocalSwarm) -> str:
    invite: str = swarm.answer("invite", "create", "--uses", "1")["invite"]
    first = swarm.start("first", "join", "--role", "hub", "--listen", "127.0.0.1:0", invite=invite)
    swarm.wait_status(first)
    for _ in poll(10, "the invite to be used"):
        if any(each["n_used"] for each in swarm.answer("invite", "list")["invites"] if each["uses"] == 1):
            break
    first.process.terminate()
    first.wait()
    return invite


def revoked(swarm: LocalSwarm) -> str:
    created = swarm.answer("invite", "create", "--uses", "2")
    (listed,) = [each for each in swarm.answer("invite", "list")["invites"] if each["uses"] == 2]
    swarm.answer("invite", "revoke", listed["id"])
    return str(created["invite"])


@pytest.mark.parametrize(
    ("make_invite", "exit_code", "code", "words"),
    [
        (foreign, 5, "foreign-swarm", "another swarm"),
        (altered, 6, "tampered", "was altered"),
        (used_up, 5, "used-up", "was used 1 times"),
        (revoked, 5, "revoked", "revoked the invite"),
    ],
)
def test_refused_node_and_the_hub_say_the_same_reason(
    swarm: LocalSwarm, make_invite: Callable[[LocalSwarm], str], exit_code: int, code: str, words: str
) -> None:
    done = swarm.call("join", make_invite(swarm), "--name", code, "--", "true", "--port", "1")
    assert done.returncode == exit_code, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("tela: error: ")]
    assert words in told
    for _ in poll(5, "the hub's log line"):
        said = [line for line in swarm.daemons[0].text().splitlines() if f'"code": "{code}"' in line]
        if said:
            break
    refusal = json.loads(said[-1])
    assert refusal["event"] == "admission.refuse"
    assert refusal["reason"] in told


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


def test_status_of_one_node_tells_what_its_owner_and_its_batch_system_say(engine: list[str]) -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "alps", "SLURM_JOB_PARTITION": "gpu"}
    with LocalSwarm(environment=job) as swarm:
        swarm.init()
        swarm.start_hub()
        words = ("--contact", "ops@example.org", "--price", "2.5", "--tier", "spot", "--label", "rack=12")
        swarm.start_worker("w1", engine, *words)
        swarm.wait_serving(MODEL)
        for _ in poll(5, "the catalog"):
            shown = swarm.call("status", "--node", "w1", "--name", "hub").stdout
            if "rack=12" in shown:
                break
        for words_shown in ("4711 in gpu", "alps", "ops@example.org", "2.5 an hour", "spot", "llama.cpp", MODEL):
            assert words_shown in shown
        view = json.loads(swarm.call("status", "--node", "w1", "--name", "hub", "--json").stdout)
        assert (view["host"], view["job_id"]) == (os.uname().nodename, "4711")
        nobody = swarm.call("status", "--node", "w9", "--name", "hub")
        assert (nobody.returncode, "0 nodes are called w9" in nobody.stderr) == (2, True)
