"""Development mode: two hosts that know nothing of each other but a file and an address are one swarm."""

from __future__ import annotations

from pathlib import Path

from scripts.demo.local_swarm import LocalSwarm
from tests.e2e.conftest import MODEL
from tests.e2e.load import ask_many


def test_hosts_with_the_same_file_are_one_swarm_and_another_file_is_refused(engine: list[str], tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("0123456789abcdef" * 4)
    wrong.write_text("fedcba9876543210" * 4)
    with LocalSwarm() as swarm:
        swarm.hub_invite = swarm.answer("swarm", "init", "--shared-key", str(secret))["invite"]
        swarm.start_hub()
        (address,) = swarm.status()["addresses"]

        def invite_of_another_host(name: str, file: Path) -> str:
            place = ("--state-dir", str(tmp_path / name))
            swarm.answer("swarm", "init", "--shared-key", str(file), *place)
            return str(swarm.answer("invite", "create", "--hub-address", address, *place)["invite"])

        swarm.invite = invite_of_another_host("good", secret)
        swarm.start_worker("w1", engine)
        swarm.wait_serving(MODEL)
        assert [outcome.error for outcome in ask_many(swarm, MODEL, n_requests=2)] == ["", ""]
        refused = swarm.call("join", invite_of_another_host("bad", wrong), "--name", "bad", "--", "true", "--port", "1")
        assert refused.returncode == 5
        assert "another swarm" in refused.stderr
        assert "another swarm" in swarm.daemons[0].text()
