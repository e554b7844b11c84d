"""The supervisor over real processes: fake engines for every fault, one real llama.cpp."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from scripts.demo import fetch_model as model_fetcher
from tela.engine import process, readiness
from tela.engine.command import parse_command
from tela.engine.process import EXIT_UNASKED, EngineSpec, Supervisor
from tela.engine.report import ExitReport, InstanceReport, ModelInfo, Whose
from tela.record import InstanceState
from tests.lab.engines import FakeLog, fake_command, wait_until


class Watched:
    """A supervisor in a nursery, what it told, and how it ended."""

    def __init__(self, argv: list[str], options: dict) -> None:
        self.told: list[InstanceReport] = []
        self.end: ExitReport | None = None
        self.ended = trio.Event()
        spec = EngineSpec(command=parse_command(argv), **options)
        self.supervisor = Supervisor(spec, on_change=self.told.append, rng=random.Random())

    async def run(self) -> None:
        self.end = await self.supervisor.serve()
        self.ended.set()

    async def wait(self, state: InstanceState, timeout_s: float = 10.0) -> InstanceReport:
        await wait_until(lambda: any(report.state is state for report in self.told), state.name, timeout_s)
        return next(report for report in self.told if report.state is state)

    async def wait_end(self) -> ExitReport:
        with trio.fail_after(15):
            await self.ended.wait()
        return self.end


@asynccontextmanager
async def supervised(*argv: str, **options: object) -> AsyncIterator[Watched]:
    watched = Watched(list(argv), options)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.run)
        yield watched
        await watched.supervisor.stop(3.0)
        await watched.wait_end()


def fake(*flags: str) -> list[str]:
    return fake_command("--port", "{port}", *flags)


async def test_engine_becomes_ready_serves_and_stops_with_zero() -> None:
    async with supervised(*fake("--model", "m,alias", "--exit-code", "9"), instance=3) as watched:
        ready = await watched.wait(InstanceState.READY)
        assert next(report.state for report in watched.told) is InstanceState.LOADING
        assert [model.id for model in ready.models] == ["m", "alias"]
        assert (ready.instance, ready.kind, ready.reason) == (3, "generic", "")
        with socket.create_connection((ready.endpoint.host, ready.endpoint.port)):
            pass
    assert watched.end == ExitReport(0, Whose.TELA, "the engine was stopped on request")
    assert watched.told[-1].state is InstanceState.DOWN
    assert (watched.told[-1].reason, watched.told[-1].endpoint) == ("the engine was stopped on request", None)


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [("0", 70, "exited 0"), ("42", 42, "exited 42"), ("-11", 139, "signal 11")],
)
async def test_exit_of_the_engine_is_ours(code: str, exit_code: int, text: str) -> None:
    async with supervised(*fake("--exit-after", "1", "--exit-code", code)) as watched:
        await watched.wait(InstanceState.READY)
        down = await watched.wait(InstanceState.DOWN)
        end = await watched.wait_end()
    assert (end.exit_code, end.whose) == (exit_code, Whose.TELA if exit_code == EXIT_UNASKED else Whose.ENGINE)
    assert text in end.text
    assert text in down.reason


async def test_instance_is_down_within_a_second_with_the_engines_last_words(tmp_path: Path) -> None:
    log = FakeLog(tmp_path / "log")
    words = tmp_path / "words"
    words.write_text("Traceback\nCUDA out of memory\n")
    async with supervised(*fake("--log", str(log.path), "--stderr-file", str(words))) as watched:
        await watched.wait(InstanceState.READY)  # whatever the log says (faults.md H01)
        os.kill(log.events("start")[0]["pid"], signal.SIGKILL)
        down = await watched.wait(InstanceState.DOWN, timeout_s=1.0)
    assert down.reason == "engine was ended by signal 9: CUDA out of memory"


async def test_instance_is_not_ready_before_the_model_list_names_a_model() -> None:
    async with supervised(*fake("--models-delay", "0.6", "--health-delay", "0.3")) as watched:
        await watched.wait(InstanceState.READY)
    reasons = [report.reason for report in watched.told if report.state is InstanceState.LOADING]
    assert reasons[-2:] == ["the health path answers 503", "the model list is empty"]


async def test_engine_without_health_path_becomes_ready() -> None:
    async with supervised(*fake("--health-mode", "404")) as watched:
        await watched.wait(InstanceState.READY)


async def test_canary_that_fails_keeps_the_instance_loading() -> None:
    async with supervised(*fake("--status", "500")) as watched:
        await wait_until(lambda: "canary" in watched.told[-1].reason if watched.told else False, "the canary")
        assert watched.told[-1].state is InstanceState.LOADING
    async with supervised(*fake("--status", "500"), is_canary=False) as watched:
        await watched.wait(InstanceState.READY)


@pytest.mark.parametrize("elsewhere", [["--listen-port", "0"], []], ids=["alive", "exits"])
async def test_port_of_a_foreign_server_is_never_registered(elsewhere: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        async with supervised(*fake_command("--port", str(port), *elsewhere)) as watched:
            await wait_until(lambda: len(watched.told) > 1, "a reason")
    assert f"port {port} is held by pid {os.getpid()}, not by my engine" in watched.told[1].reason
    assert all(report.state is not InstanceState.READY for report in watched.told)


async def test_engine_that_listens_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "WRONG_PORT_HINT_S", 0.5)
    async with supervised(*fake("--listen-port", "0")) as watched:
        await wait_until(lambda: "engine listens on" in watched.told[-1].reason if watched.told else False, "the hint")


async def test_engine_that_does_not_get_ready_is_given_up(tmp_path: Path) -> None:
    async with supervised(*fake("--health-mode", "503"), start_timeout_s=0.5) as watched:
        end = await watched.wait_end()
    assert (end.exit_code, end.whose) == (4, Whose.TELA)
    assert end.text == "not ready after 0.5 s: the health path answers 503"


async def test_new_adapter_is_told_while_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "REPROBE_S", 0.2)
    more = tmp_path / "models"
    async with supervised(*fake("--models-file", str(more))) as watched:
        await watched.wait(InstanceState.READY)
        more.write_text("adapter")
        await wait_until(lambda: ModelInfo("adapter", 4096) in watched.told[-1].models, "the adapter")


async def test_engine_is_restarted_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MIN_BACKOFF_S", 0.05)
    async with supervised(*fake("--exit-after", "0.1", "--exit-code", "5"), n_restarts=2) as watched:
        end = await watched.wait_end()
    assert end.exit_code == 5
    downs = [report for report in watched.told if report.state is InstanceState.DOWN]
    assert len(downs) == 3


async def test_engine_that_lost_its_picked_port_starts_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody binds the picked port between its release and the engine's bind."""
    thieves = []
    real = process.PortBlock.let_engine_bind

    def steal(block: process.PortBlock) -> None:
        real(block)
        if not thieves:
            thieves.append(socket.create_server(("127.0.0.1", block.port)))

    monkeypatch.setattr(process.PortBlock, "let_engine_bind", steal)
    try:
        async with supervised(*fake()) as watched:
            ready = await watched.wait(InstanceState.READY)
            assert ready.endpoint.port != thieves[0].getsockname()[1]
    finally:
        thieves[0].close()


async def test_stop_during_back_off_ends_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MIN_BACKOFF_S", 60.0)
    async with supervised(*fake("--exit-after", "0"), n_restarts=1) as watched:
        await watched.wait(InstanceState.DOWN)
    assert watched.end.exit_code == 0


async def test_engine_deaf_to_term_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with supervised(*fake("--ignore-term", "--fork-children", "ignore-term")) as watched:
        await watched.wait(InstanceState.READY)
        started_s = trio.current_time()
        await watched.supervisor.stop(0.3)
        assert trio.current_time() - started_s < 2.0
    assert watched.end.exit_code == 0


async def test_many_engines_at_once_get_ports_of_their_own() -> None:
    engines = [Watched(fake(), {}) for _ in range(6)]
    async with trio.open_nursery() as nursery:
        for watched in engines:
            nursery.start_soon(watched.run)
        ready = [await watched.wait(InstanceState.READY) for watched in engines]
        for watched in engines:
            nursery.start_soon(watched.supervisor.stop, 3.0)
    assert len({report.endpoint.port for report in ready}) == len(engines)


async def test_real_llama_server_becomes_ready_behind_a_key_of_its_own() -> None:
    weights = await trio.to_thread.run_sync(model_fetcher.fetch_model)
    server = str(Path(model_fetcher.__file__).with_name("llama_server.py"))
    async with supervised(sys.executable, server, "--model", str(weights), "--alias", "tiny") as watched:
        ready = await watched.wait(InstanceState.READY, timeout_s=15.0)
        endpoint = ready.endpoint
        url = f"http://{endpoint.host}:{endpoint.port}/v1/completions"
        async with httpx.AsyncClient(trust_env=False) as client:
            answers = [
                await client.post(url, json={"prompt": "a", "max_tokens": 1}, headers=headers, timeout=10)
                for headers in ({}, {"authorization": f"Bearer {endpoint.api_key}"})
            ]
    assert (ready.kind, [model.id for model in ready.models]) == ("llama.cpp", ["tiny"])
    assert ready.models[0].max_context_tokens > 0
    assert [answer.status_code for answer in answers] == [401, 200]
    assert watched.end.exit_code == 0
