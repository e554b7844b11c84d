"""One request from its parsed form to the end of its answer: choose, try, choose again, and keep the account.

What may be tried again is decided in :mod:`tela.ingress.proxy`, whom to try in :mod:`tela.ingress.router`; here is the
loop over both, with its bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from tela.crdt.registry import Candidate, Snapshot
from tela.errors import TelaError
from tela.ingress import headers, openai, router
from tela.ingress.body import BodyFields, read_body
from tela.ingress.framing import Headers
from tela.ingress.headers import Wishes
from tela.ingress.http1 import Request, Responder
from tela.ingress.openai import ApiError
from tela.ingress.policy import Chooser
from tela.ingress.proxy import Answer, Attempts, UnstartedError
from tela.ingress.router import FailureMemory, Query, Replica, Sight, Verdict
from tela.net.inflight import InFlight
from tela.observe import ingress_attempts, ingress_first_byte, ingress_inflight, ingress_requests, log
from tela.record import NodeId, short
from tela.wire import Claim, GateCode, RequestHead

MAX_RETRIES: Final = 2
"""Further instances after the first; more would only add load where all are failing (faults.md D05)."""
THREAD_BODY_BYTES: Final = 1024 * 1024
"""A larger body is read in a thread: scanning it may take tens of milliseconds, which others would wait."""
CLIENT_CLOSED: Final = 499
"""In the log only: the client went away."""


@dataclass(slots=True)
class Account:
    """What the audit line will say of a request; never what was asked or answered."""

    request_id: str
    started_s: float
    model: str = ""
    is_model_known: bool = False
    is_stream: bool = False
    candidate: Candidate | None = None
    n_attempts: int = 0
    status: int = CLIENT_CLOSED

    def headers(self) -> Headers:
        """What the answer says of its way."""
        shown = [(b"x-request-id", self.request_id.encode()), (b"x-tela-attempts", b"%d" % self.n_attempts)]
        if self.candidate is not None:
            shown.append((b"x-tela-node", short(self.candidate.node).encode()))
            # Certificates carry text; a header carries visible ASCII.
            shown.append((b"x-tela-provider", self.candidate.provider.encode("ascii", "backslashreplace")))
        return tuple(shown)

    def close(self) -> None:
        """Count and log, once, however the request ended."""
        # A name that nobody serves comes from the client, and would make labels without bound.
        label = self.model if self.is_model_known else "unknown"
        ingress_requests.labels(model=label, status=str(self.status)).inc()
        log.info(
            "ingress.request",
            request=self.request_id,
            model=self.model[:256],
            provider=self.candidate.provider if self.candidate else "",
            node=short(self.candidate.node) if self.candidate else "",
            status=self.status,
            is_stream=self.is_stream,
            attempts=self.n_attempts,
            ms=round((trio.current_time() - self.started_s) * 1000),
        )


@dataclass(frozen=True, slots=True)
class _Errand:
    """One request, read: what every attempt at it needs."""

    request: Request
    fields: BodyFields
    wishes: Wishes
    account: Account
    answer: Answer

    @property
    def deadline_s(self) -> float:
        return self.account.started_s + self.wishes.timeout_s


class Forwarder:
    """Carries requests to instances. One for all requests of an ingress: it remembers turns and failures."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        reachable: Callable[[], frozenset[NodeId]],
        doubted: Callable[[], frozenset[NodeId]],
        attempts: Attempts,
        claim: Callable[[], Claim],
        on_dead: Callable[[NodeId], None],
        rng: random.Random,
        now: Callable[[], float],
        failures: FailureMemory,
    ) -> None:
        self._snapshot = snapshot
        self._reachable = reachable
        self._doubted = doubted
        self._attempts = attempts
        self._claim = claim
        self._on_dead = on_dead
        self._rng = rng
        self._now = now
        self._failures = failures
        self._chooser = Chooser(rng)
        self.in_flight = InFlight(ingress_inflight)

    async def forward(self, request: Request, responder: Responder) -> None:
        """Answer one request from whichever instance takes it.

        Raises:
            StreamResetError: the answer broke after its start; the connection must break as well.
        """
        request_id = headers.request_id(request.headers) or f"{self._rng.getrandbits(128):032x}"
        account = Account(request_id, trio.current_time())
        with self.in_flight.scope():
            try:
                await self._answer(request, responder, account)
            except ApiError as error:
                account.status = error.status
                await responder.json(error.status, error.value(), (*error.headers, *account.headers()))
            except TelaError as error:
                account.status = openai.from_error(error).status
                raise
            except Exception:
                account.status = openai.internal().status
                raise
            finally:
                account.close()

    def judge(self, query: Query) -> tuple[Verdict, ...]:
        """What would become of a request now: a verdict on every candidate."""
        return router.judge(self._sight(), query)

    def _sight(self) -> Sight:
        avoid_s = self._failures.left_s(trio.current_time())
        return Sight(self._snapshot(), self._reachable(), self._now(), avoid_s, self._doubted())

    async def _answer(self, request: Request, responder: Responder, account: Account) -> None:
        snapshot = self._snapshot()
        wishes = headers.read_wishes(request.headers, {member.provider for member in snapshot.members.values()})
        fields = await _read(request)
        account.model, account.is_stream = fields.model, fields.is_stream
        account.is_model_known = fields.model in snapshot.models

        def on_first_byte() -> None:
            ingress_first_byte.observe(trio.current_time() - account.started_s)

        answer = Answer(responder, request.path, on_first_byte)
        await self._try_candidates(_Errand(request, fields, wishes, account, answer))
        # A break after the first byte is told in band; the status that was sent can no longer say it.
        account.status = openai.upstream_failed("").status if answer.is_broken else answer.status

    async def _try_candidates(self, errand: _Errand) -> None:
        tried: frozenset[Replica] = frozenset()
        failure: UnstartedError | None = None
        max_attempts = 1 + (MAX_RETRIES if errand.wishes.may_retry else 0)
        while errand.account.n_attempts < max_attempts:
            candidate = self._choose(errand, tried, failure)
            tried |= {router.replica_of(candidate)}
            failure = await self._try(errand, candidate)
            if failure is None:
                return
        assert failure is not None  # at least one attempt was made
        raise _exhausted(failure)

    def _choose(self, errand: _Errand, tried: frozenset[Replica], failure: UnstartedError | None) -> Candidate:
        query = Query(errand.fields.model, errand.wishes.allowlist, tried)
        sight = self._sight()
        verdicts = router.judge(sight, query)
        candidates = router.fit(verdicts)
        if candidates:
            return self._chooser.choose(errand.wishes.policy, candidates)
        raise _exhausted(failure) if failure is not None else router.refusal(sight, query, verdicts)

    async def _try(self, errand: _Errand, candidate: Candidate) -> UnstartedError | None:
        """One attempt; the failure where somebody else may be asked, None when the answer is out."""
        account = errand.account
        account.candidate, account.n_attempts = candidate, account.n_attempts + 1
        result = "error"
        try:
            await self._attempts.attempt(
                candidate.node,
                self._head(errand, candidate),
                errand.request.body,
                errand.answer,
                own_headers=account.headers(),
                deadline=errand.deadline_s,
            )
            result = "error" if errand.answer.is_broken else "ok"
        except UnstartedError as failure:
            result = "dead" if failure.is_dead else "refused"
            self._note(candidate, failure)
            return failure
        finally:
            ingress_attempts.labels(result=result).inc()
        return None

    def _note(self, candidate: Candidate, failure: UnstartedError) -> None:
        if failure.code != GateCode.REFUSED:  # that is a policy on this caller, not a failure
            self._failures.note(router.replica_of(candidate), trio.current_time())
        if failure.is_dead:
            self._on_dead(candidate.node)

    def _head(self, errand: _Errand, candidate: Candidate) -> RequestHead:
        request, request_id = errand.request, errand.account.request_id
        return RequestHead(
            claim=self._claim(),
            instance=candidate.instance,
            request_id=request_id,
            deadline_s=max(0.001, errand.deadline_s - trio.current_time()),
            method=request.method,
            target=request.target,
            headers=headers.forwarded(request.headers, n_body_bytes=len(request.body), request_id=request_id),
        )


async def _read(request: Request) -> BodyFields:
    content_type = request.header(b"content-type") or b""
    if len(request.body) <= THREAD_BODY_BYTES:
        return read_body(request.body, content_type)
    return await trio.to_thread.run_sync(read_body, request.body, content_type)


def _exhausted(failure: UnstartedError) -> ApiError:
    """What the client reads when everyone that may be asked was asked; the last failure decides."""
    if failure.code == GateCode.REFUSED:
        return openai.provider_not_allowed(f"the provider refused this caller: {failure}")
    if failure.code == GateCode.DRAINING:
        return openai.unavailable(str(failure), code="draining")
    return openai.unavailable(str(failure))
