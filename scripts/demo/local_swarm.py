"""A swarm of real processes on this host, driven through the command line as a user would.

The demo, the end-to-end tests and the benches stand on it. Every daemon is a process of its own with its log in a file;
all of them share one private state and runtime folder, so nothing of the user's is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

TELA = str(Path(sys.executable).with_name("tela"))
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class Daemon:
    """One tela process and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Of tela itself; the engine is below it."""
        return self.process.pid

    def family(self) -> list[psutil.Process]:
        """The daemon and every descendant that is alive now."""
        try:
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code, once it ended."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        """Everything it wrote."""
        return self.log.read_text(errors="replace")


class LocalSwarm:
    """One swarm in a folder of its own; a context manager that leaves no process behind."""

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        # A short path: unix socket names are limited to 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tela-", dir="/tmp"))
        self.daemons: list[Daemon] = []
        self.environment = {
            **os.environ,
            "TELA_STATE_DIR": str(self.folder / "state"),
            "TELA_RUNTIME_DIR": str(self.folder / "run"),
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.hub_invite = ""
        self.invite = ""
        self.base_url = ""

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- commands that end -----------------------------------------------------------------------------------------

    def call(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 90.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``tela ARGUMENTS`` to its end, whatever its exit code."""
        return subprocess.run(
            [TELA, *arguments],
            env=self.environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def answer(self, *arguments: str) -> Any:
        """The JSON object that ``tela ARGUMENTS --json`` prints; its failure is ours."""
        done = self.call(*arguments, "--json")
        if done.returncode != 0:
            raise RuntimeError(f"tela {' '.join(arguments)} exited {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    def status(self, name: str = "hub") -> Any:
        """``tela status --json`` of one daemon."""
        return self.answer("status", "--name", name)["daemons"][0]

    def wait_serving(
        self, model: str, *, replicas: int = 1, timeout_s: float = START_TIMEOUT_S, name: str = "hub"
    ) -> None:
        """Wait until the daemon called ``name`` would route ``model`` to that many instances."""
        for _ in poll(timeout_s, f"{replicas} replicas of {model}"):
            models = {view["model"]: view for view in self.status(name)["models"]}
            if model in models and models[model]["n_ready"] >= replicas:
                return

    # -- daemons ---------------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Make the swarm; its first hub's invite is kept for :meth:`start_hub`."""
        self.hub_invite = self.answer("swarm", "init")["invite"]

    def start(self, name: str, *arguments: str, invite: str = "") -> Daemon:
        """Start a daemon: ``tela ARGUMENTS --name NAME`` with the invite in its environment."""
        log = self.folder / f"{name}-{len(self.daemons)}.log"
        head, separator, engine = partition(arguments, "--")
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.command(name, TELA, *head, "--name", name, *separator, *engine),
                env={**self.environment, "TELA_INVITE": invite or self.invite},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the demo's terminal is for the demo to handle
            )
        daemon = Daemon(name, process, log)
        self.daemons.append(daemon)
        return daemon

    def command(self, name: str, *argv: str) -> list[str]:
        """What starts the daemon called ``name``: its argv as it is, on this host."""
        return list(argv)

    def start_hub(self, *, name: str = "hub", http: str = "127.0.0.1:0", listen: str = "127.0.0.1:0") -> Daemon:
        """Start the first hub, which is also the ingress, and make the workers' invite."""
        hub = self.start(name, "ingress", "--hub", "--http", http, "--listen", listen, invite=self.hub_invite)
        self.base_url = self.wait_status(hub)["base_url"]
        if not self.invite:
            self.invite = self.answer("invite", "create", "--roles", "worker,ingress", "--uses", "1000")["invite"]
        return hub

    def start_worker(self, name: str, engine: Sequence[str], *options: str) -> Daemon:
        """Start a worker that wraps ``engine``."""
        return self.start(name, "join", *options, "--", *engine)

    def wait_status(self, daemon: Daemon, timeout_s: float = START_TIMEOUT_S) -> Any:
        """The daemon's first status in which it is SERVING."""
        for _ in poll(timeout_s, f"{daemon.name} to serve"):
            if daemon.process.poll() is not None:
                raise RuntimeError(f"{daemon.name} exited {daemon.process.returncode}:\n{daemon.text()[-2000:]}")
            done = self.call("status", "--name", daemon.name, "--json")
            if done.returncode == 0 and (status := json.loads(done.stdout)["daemons"][0])["state"] == "serving":
                return status
        raise AssertionError("unreachable: poll raises at its limit")

    def kill(self, daemon: Daemon) -> list[psutil.Process]:
        """SIGKILL tela alone, as the out-of-memory killer would; returns the family that must follow it."""
        family = daemon.family()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(STOP_TIMEOUT_S)
        return family

    def stop(self) -> None:
        """End every daemon that still runs: TERM, and KILL for what does not follow. Newest first, the hub last."""
        families = [process for daemon in self.daemons for process in daemon.family()]
        for daemon in reversed(self.daemons):
            if daemon.process.poll() is None:
                daemon.process.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait()
            except subprocess.TimeoutExpired:
                daemon.process.kill()
                daemon.process.wait()
        _, alive = psutil.wait_procs(families, timeout=STOP_TIMEOUT_S)
        for process in alive:
            process.kill()


def partition(arguments: Sequence[str], mark: str) -> tuple[list[str], list[str], list[str]]:
    """Split at the first ``mark``, like str.partition."""
    if mark not in arguments:
        return list(arguments), [], []
    index = list(arguments).index(mark)
    return list(arguments[:index]), [mark], list(arguments[index + 1 :])


def poll(timeout_s: float, what: str, interval_s: float = 0.05) -> Any:
    """Yield until the loop is left; raise TimeoutError naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield
        time.sleep(interval_s)
    raise TimeoutError(f"waited {timeout_s:g} s for {what}")
