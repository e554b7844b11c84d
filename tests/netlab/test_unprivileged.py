"""tela needs no privilege: a whole swarm runs where nobody has any over the host, in namespaces made by `unshare`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Root keeps the one capability without which it may not map itself into a namespace (user_namespaces(7)).
DROP_ROOT_S = ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+setfcap"] if os.geteuid() == 0 else []
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]


def test_swarm_runs_without_any_privilege_on_the_host() -> None:
    program = [sys.executable, "-m", "tests.netlab.unprivileged"]
    done = subprocess.run([*DROP_ROOT_S, *OWN_NETWORK, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["errors"] == []
    assert told["user_namespace"] != str(Path("/proc/self/ns/user").readlink())
    assert told["network"] != str(Path("/proc/self/ns/net").readlink())
