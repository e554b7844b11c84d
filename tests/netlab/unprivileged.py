"""A swarm inside a user and network namespace of its own; run by test_unprivileged.py, which reads the last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.demo.local_swarm import LocalSwarm
from tests.e2e.load import ask_many
from tests.lab.engines import fake_command


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # allowed: this network is ours alone
    with LocalSwarm() as swarm:
        swarm.init()
        swarm.start_hub()
        swarm.start_worker("w1", fake_command("--port", "{port}", "--model", "fake"))
        swarm.wait_serving("fake")
        outcomes = ask_many(swarm, "fake", n_requests=5)
    told = {
        "errors": [outcome.error for outcome in outcomes if outcome.error],
        "user_namespace": str(Path("/proc/self/ns/user").readlink()),
        "network": str(Path("/proc/self/ns/net").readlink()),
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
