"""Supervises one engine: spawn, probe, ready, re-probe, restart, and whose exit code it was.

The trio shell around :mod:`tela.engine.readiness`; signals to tela are the node's to handle.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from tela.engine.command import EngineCommand, Launch
from tela.engine.events import (
    CanaryPassed,
    Check,
    GiveUp,
    HealthSeen,
    Holder,
    ModelsSeen,
    Notify,
    ProbeFailed,
    Progress,
    ReadinessEffect,
    ReadinessEvent,
    Started,
    Step,
)
from tela.engine.guarded import EngineExit, GuardedEngine, open_engine
from tela.engine.ports import PortBlock, look_at_port, reserve_block
from tela.engine.probe import Prober, open_prober
from tela.engine.readiness import Readiness, ReadinessPlan, foreign_text
from tela.engine.report import Endpoint, ExitReport, InstanceReport, Whose
from tela.errors import DeadlineError, EngineError
from tela.observe import log
from tela.record import InstanceState, clipped

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

EXIT_UNASKED: Final = 70
"""Exit code where an engine ended with 0 although its service was wanted (faults.md H05)."""
MAX_PORT_TRIES: Final = 5
"""Starts on another port after the picked one was taken by somebody else between pick and bind."""
MIN_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
HEALTHY_S: Final = 600.0
"""After so long in service the count of restarts begins anew."""
KILL_WAIT_S: Final = 5.0
"""After KILL a process may still be in the kernel, giving back a GPU; longer is not ours to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to run and how to watch it."""

    command: EngineCommand
    instance: int = 0
    health_path: str = "/health"
    models_path: str = "/v1/models"
    is_canary: bool = True
    start_timeout_s: float = 1800.0
    n_restarts: int = 0


@dataclass(frozen=True, slots=True)
class _Life:
    """One start of the engine, over now."""

    report: ExitReport
    is_port_lost: bool  # somebody else took the port that we picked
    served_s: float


class Supervisor:
    """Runs one engine until it ends for good or is asked to stop."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        on_change: Callable[[InstanceReport], None],
        rng: random.Random | None = None,
    ) -> None:
        self._spec = spec
        self._on_change = on_change
        self._rng = rng or random.SystemRandom()
        self._engine: GuardedEngine | None = None
        self._endpoint: Endpoint | None = None
        self._facts = spec.command.facts(spec.instance)
        self._stopping = trio.Event()
        self._given_up: str | None = None
        self._ready_since_s: float | None = None

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> ExitReport:
        """Keep the engine running. Returns when it ended and is not to be restarted, or after :meth:`stop`.

        Raises:
            EngineError: nothing could be spawned: no guard, no free port.
        """
        task_status.started()
        n_port_tries, n_restarts = 1, 0
        while True:
            life = await self._live()
            if life.report.exit_code == 0:  # only a stop on request gives 0
                return life.report
            if life.is_port_lost and n_port_tries < MAX_PORT_TRIES:
                n_port_tries += 1
                continue
            n_restarts = 1 if life.served_s >= HEALTHY_S else n_restarts + 1
            if n_restarts > self._spec.n_restarts:
                return life.report
            if not await self._back_off(n_restarts, life.report.text):
                return ExitReport(0, Whose.TELA, "stopped on request before a restart of the engine")

    async def stop(self, grace_s: float) -> None:
        """End the engine: TERM to its tree, KILL after ``grace_s``. Returns when nothing of the tree is left."""
        self._stopping.set()
        engine = self._engine
        if engine is None:
            return
        log.info("engine.stop", instance=self._spec.instance, grace_s=grace_s)
        await _end(engine, grace_s)

    async def _back_off(self, n_restarts: int, reason: str) -> bool:
        """Wait before a restart; False where a stop came first."""
        delay_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** (n_restarts - 1))
        log.info("engine.restart", instance=self._spec.instance, delay_s=delay_s, restart=n_restarts, reason=reason)
        with trio.move_on_after(delay_s):
            await self._stopping.wait()
        return not self._stopping.is_set()

    # -- one start ---------------------------------------------------------------------------------------------------

    async def _live(self) -> _Life:
        self._given_up = self._ready_since_s = None
        with reserve_block(self._rng) as block:
            launch = self._launch(block)
            block.let_engine_bind()
            async with open_engine(launch.argv, launch.environ) as engine:
                self._engine = engine
                log.info("engine.start", instance=self._spec.instance, pid=engine.guard_pid, port=launch.endpoint.port)
                try:
                    return await self._follow(engine, launch.endpoint, block)
                finally:
                    self._engine = None

    def _launch(self, block: PortBlock) -> Launch:
        return self._spec.command.launch(
            port=self._spec.command.port or block.port,
            helper_port=block.helper_ports[0],
            new_key=secrets.token_urlsafe(24),
        )

    async def _follow(self, engine: GuardedEngine, endpoint: Endpoint, block: PortBlock) -> _Life:
        """Watch a running engine until its tree is gone."""
        if self._stopping.is_set():  # the stop came while it was being spawned
            engine.kill()
        self._endpoint = endpoint
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, engine, endpoint, block.helper_ports)
            ended = await engine.wait_exit()
            nursery.cancel_scope.cancel()
        report = self._judge(ended)
        thief = await self._port_thief(engine, endpoint)
        details = "" if self._stopping.is_set() else thief or ended.tail
        self._notify(Notify(InstanceState.DOWN, (), _reason(report.text, details)))
        log.info("engine.exit", instance=self._spec.instance, code=ended.code, reason=report.text)
        await engine.wait_gone()
        served_s = 0.0 if self._ready_since_s is None else trio.current_time() - self._ready_since_s
        return _Life(report, is_port_lost=bool(thief) and self._spec.command.port is None, served_s=served_s)

    async def _port_thief(self, engine: GuardedEngine, endpoint: Endpoint) -> str:
        """Who had the port where the engine ended before it was ready; "" where nobody else had it."""
        if self._ready_since_s is not None or self._stopping.is_set():
            return ""
        seen = await trio.to_thread.run_sync(look_at_port, endpoint.host, endpoint.port, engine.guard_pid)
        return foreign_text(endpoint.port, seen.holder_pid) if seen.holder is Holder.FOREIGN else ""

    def _judge(self, ended: EngineExit) -> ExitReport:
        if self._stopping.is_set():
            return ExitReport(0, Whose.TELA, "the engine was stopped on request")
        if self._given_up is not None:
            return ExitReport(DeadlineError.exit_code, Whose.TELA, self._given_up)
        if ended.code < 0:
            return ExitReport(128 - ended.code, Whose.ENGINE, f"engine was ended by signal {-ended.code}")
        if ended.code == 0:
            return ExitReport(EXIT_UNASKED, Whose.TELA, "engine exited 0 without having been asked")
        return ExitReport(ended.code, Whose.ENGINE, f"engine exited {ended.code}")

    # -- readiness ---------------------------------------------------------------------------------------------------

    async def _watch(self, engine: GuardedEngine, endpoint: Endpoint, helper_ports: range) -> None:
        """Probe and tell, until cancelled or until it takes too long."""
        spec, preset = self._spec, self._spec.command.preset
        plan = ReadinessPlan(
            port=endpoint.port,
            is_canary=spec.is_canary,
            start_timeout_s=spec.start_timeout_s,
            own_ports=helper_ports,
        )
        core = Readiness(plan)
        async with open_prober(endpoint, health_path=spec.health_path, models_path=spec.models_path) as prober:
            event: ReadinessEvent = Started()
            is_version_asked = False
            while check := self._apply(core.handle(event, trio.current_time())):
                await trio.sleep(check.delay_s)
                event = await _look(check.step, engine, endpoint, prober, core)
                if isinstance(event, ModelsSeen) and preset.version_path and not is_version_asked:
                    is_version_asked = True
                    version = await prober.version(preset.version_path, preset.version_key)
                    self._facts = msgspec.structs.replace(self._facts, version=version)
        await _end(engine, grace_s=KILL_WAIT_S)

    def _apply(self, effects: list[ReadinessEffect]) -> Check | None:
        """Carry out effects; the check to do next, or None where the core gave up."""
        following = None
        for effect in effects:
            match effect:
                case Notify():
                    self._notify(effect)
                case Progress():
                    log.info("engine.wait", instance=self._spec.instance, reason=effect.text)
                case GiveUp():
                    self._given_up = effect.text
                case Check():
                    following = effect
        return following

    def _notify(self, change: Notify) -> None:
        is_ready = change.state is InstanceState.READY
        if is_ready and self._ready_since_s is None:
            self._ready_since_s = trio.current_time()
        self._log_change(change)
        report = InstanceReport(
            instance=self._spec.instance,
            kind=self._spec.command.preset.kind,
            state=change.state,
            models=change.models,
            reason=change.reason,
            endpoint=self._endpoint if is_ready else None,
            facts=self._facts,
        )
        self._on_change(report)

    def _log_change(self, change: Notify) -> None:
        instance = self._spec.instance
        if change.state is InstanceState.READY:
            log.info("engine.ready", instance=instance, models=[model.id for model in change.models])
        elif change.state is InstanceState.DOWN:
            tell = log.info if self._stopping.is_set() else log.warning
            tell("engine.down", instance=instance, reason=change.reason)
        else:
            log.debug("engine.wait", instance=instance, reason=change.reason)


async def _end(engine: GuardedEngine, grace_s: float) -> None:
    """TERM, KILL after ``grace_s``, and a bounded wait for the kernel to let go."""
    engine.terminate()
    with trio.move_on_after(grace_s) as scope:  # nothing is lost: what is left is killed
        await engine.wait_gone()
    if scope.cancelled_caught:
        engine.kill()
        with trio.move_on_after(KILL_WAIT_S):  # the guard goes on killing without us
            await engine.wait_gone()


async def _look(
    step: Step, engine: GuardedEngine, endpoint: Endpoint, prober: Prober, core: Readiness
) -> ReadinessEvent:
    """Do one check; a failure of it is an event as well."""
    try:
        match step:
            case Step.PORT:
                host, port, guard_pid = endpoint.host, endpoint.port, engine.guard_pid
                return await trio.to_thread.run_sync(look_at_port, host, port, guard_pid)
            case Step.HEALTH:
                engine.remember_tree()
                return HealthSeen(await prober.health())
            case Step.MODELS:
                return ModelsSeen(await prober.models())
            case Step.CANARY:
                await prober.canary(core.models[0].id)
                return CanaryPassed()
    except EngineError as error:
        return ProbeFailed(str(error))


def _reason(text: str, details: str) -> str:
    """Why the engine is down, with the last line of ``details``, as much as fits on the wire."""
    lines = [line.strip() for line in details.splitlines() if line.strip()]
    reason = f"{text}: {lines[-1]}" if lines else text
    return clipped(reason)
