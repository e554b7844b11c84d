"""The guard on real processes: nothing of an engine's tree outlives tela (design/engine.md, Life)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from tela.engine import guarded
from tela.engine.guard import CANNOT_RUN, descendants, signal_all
from tela.engine.guarded import GUARD_LOST, open_engine
from tests.lab.engines import FakeLog, fake_command, wait_until

FOLLOW_LIMIT_S = 10.0
OWNER = """
import sys, trio
from tela.engine.guarded import open_engine

async def own(argv):
    async with open_engine(argv, {}) as engine:
        print(engine.guard_pid, flush=True)
        await trio.sleep_forever()

trio.run(own, sys.argv[1:])
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_kill_of_tela_leaves_no_descendant_even_one_that_double_forked_and_ignores_term(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    flags = ["--port", "0", "--log", str(log.path), "--ignore-term", "--fork-children", "ignore-term"]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *fake_command(*flags)], stdout=subprocess.PIPE)
    try:
        await log.wait("start")
        pids = {event["pid"] for name in ("start", "child") for event in await log.wait(name)}
        pids.add(int(owner.stdout.readline()))
        assert len(pids) == 3
        assert all(map(is_alive, pids))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    await wait_until(lambda: not any(map(is_alive, pids)), "the tree to end", FOLLOW_LIMIT_S)


async def test_end_of_the_engine_is_told_at_once_and_what_it_left_is_ended(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    noise = tmp_path / "noise"
    noise.write_text("ERROR: out of memory\n")
    flags = ["--port", "0", "--log", str(log.path), "--fork-children", "ignore-term", "--stderr-file", str(noise)]
    async with open_engine(fake_command(*flags, "--exit-after", "0.3", "--exit-code", "42"), {}) as engine:
        (child,) = await log.wait("child")
        ended = await engine.wait_exit()
        assert ended.code == 42
        assert ended.tail == "ERROR: out of memory\n"
        assert is_alive(child["pid"])
        await engine.wait_gone()
        assert not is_alive(child["pid"])


@pytest.mark.parametrize(("code", "told"), [("0", 0), ("7", 7), ("-11", -11)])
async def test_exit_code_or_signal_is_told(code: str, told: int) -> None:
    async with open_engine(fake_command("--port", "0", "--exit-after", "0", "--exit-code", code), {}) as engine:
        assert (await engine.wait_exit()).code == told
        await engine.wait_gone()


async def test_command_that_cannot_be_run_exits_127_and_says_why() -> None:
    async with open_engine(["/nonexistent/engine", "--port", "1"], {}) as engine:
        ended = await engine.wait_exit()
    assert ended.code == CANNOT_RUN
    assert "cannot run /nonexistent/engine: No such file or directory" in ended.tail


async def test_terminate_is_obeyed_and_kill_is_final(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    async with open_engine(fake_command("--port", "0", "--log", str(log.path), "--ignore-term"), {}) as engine:
        await log.wait("start")
        engine.terminate()
        with trio.move_on_after(0.3) as scope:
            await engine.wait_exit()
        assert scope.cancelled_caught
        engine.kill()
        assert (await engine.wait_exit()).code == -signal.SIGKILL
        await engine.wait_gone()


async def test_engine_whose_guard_is_killed_is_ended(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    flags = ["--port", "0", "--log", str(log.path), "--fork-children", "ignore-term"]
    async with open_engine(fake_command(*flags), {}) as engine:
        await log.wait("start")
        pids = [event["pid"] for name in ("start", "child") for event in await log.wait(name)]
        engine.remember_tree()
        os.kill(engine.guard_pid, signal.SIGKILL)
        assert (await engine.wait_exit()).code == GUARD_LOST
        await wait_until(lambda: not any(map(is_alive, pids)), "the tree to end")


async def test_guard_ignores_the_signals_of_a_batch_system_and_the_engine_gets_them_by_default(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    async with open_engine(fake_command("--port", "0", "--log", str(log.path)), {}) as engine:
        (started,) = await log.wait("start")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(engine.guard_pid, number)
        os.kill(started["pid"], signal.SIGUSR1)  # the fake has no handler: the default ends it
        assert (await engine.wait_exit()).code == -signal.SIGUSR1


async def test_engine_sees_the_environment_but_no_invite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELA_INVITE", "secret")
    monkeypatch.setenv("MINE", "kept")
    shown = tmp_path / "environment"
    async with open_engine(["sh", "-c", f"env > {shown}"], {"VLLM_PORT": "4712"}) as engine:
        assert (await engine.wait_exit()).code == 0
    assert {"MINE=kept", "VLLM_PORT=4712"} <= set(shown.read_text().splitlines())
    assert "secret" not in shown.read_text()


async def test_leaving_the_block_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_CLOSE_S", 5.0)
    log = FakeLog(tmp_path / "log")
    async with open_engine(fake_command("--port", "0", "--log", str(log.path)), {}):
        (started,) = await log.wait("start")
    assert not is_alive(started["pid"])


def test_signal_spares_a_process_that_only_has_the_same_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        (key,) = [key for key in descendants(os.getpid()) if key.pid == process.pid]
        signal_all([key._replace(start_ticks=key.start_ticks - 1)], signal.SIGKILL)
        time.sleep(0)  # a signal would be delivered by now: kill(2) queues it before it returns
        assert process.poll() is None
        signal_all([key], signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
