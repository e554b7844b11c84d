"""The ingress: OpenAI's API in front of every instance that the registry knows.

One forwarding path for all that is posted, so that filters and retries are the same everywhere (faults.md D03); what is
only read is answered from the snapshot.
"""

from __future__ import annotations

import random
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from tela.crdt.registry import Candidate, Snapshot
from tela.ingress import callers, openai
from tela.ingress.forwarding import Forwarder
from tela.ingress.http1 import Limits, Request, Responder, serve_connection
from tela.ingress.proxy import Attempts
from tela.ingress.router import FailureMemory, Query, Verdict
from tela.net.inflight import InFlight
from tela.net.requests import RequestClient
from tela.observe import log
from tela.record import ModelId, NodeId
from tela.wire import Claim

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

FORWARDED: Final = re.compile(
    r"/v1/(chat/completions|completions|embeddings|responses|rerank|score|(audio|images)/[a-z_]+)"
    r"|/(tokenize|detokenize|rerank|score)"
)
"""What is handed on. Anything else an engine may offer, its administration above all, is out of reach."""
_MODELS: Final = "/v1/models"
_READ_METHODS: Final = frozenset({"GET", "HEAD"})

REMEDY: Final = (
    "this ingress serves processes of its own user on this host only; call from that account, "
    "or start it with --allow-any"
)


class Ingress:
    """Answers clients. The node hands in what it knows as callables, so that each request sees the present state.

    Args:
        snapshot: the registry's present snapshot.
        reachable: peers with a live connection, this node included where it serves models itself.
        doubted: those of them that do not answer us now.
        client: carries requests over the mesh.
        claim: this ingress' signed word on who calls.
        on_dead: told of a peer that died under a request.
        rng: chance for policies and request ids.
        is_ready: whether the registry is complete enough to answer from.
        now: unix seconds.
        limits: what one client may cost.
        is_open: serve whoever connects, not only processes of our own user.
        is_own: whether a connection comes from such a process.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        reachable: Callable[[], frozenset[NodeId]],
        doubted: Callable[[], frozenset[NodeId]] = frozenset,
        client: RequestClient,
        claim: Callable[[], Claim],
        on_dead: Callable[[NodeId], None],
        rng: random.Random,
        is_ready: Callable[[], bool],
        now: Callable[[], float],
        limits: Limits | None = None,
        is_open: bool = False,
        is_own: Callable[[trio.SocketStream], Awaitable[bool]] = callers.is_own_process,
    ) -> None:
        self._snapshot = snapshot
        self._reachable = reachable
        self._is_ready = is_ready
        self._limits = limits or Limits()
        self._is_open = is_open
        self._is_own = is_own
        self._started_unix_s = int(now())
        self._forwarder = Forwarder(
            snapshot=snapshot,
            reachable=reachable,
            doubted=doubted,
            attempts=Attempts(client, reachable),
            claim=claim,
            on_dead=on_dead,
            rng=rng,
            now=now,
            failures=FailureMemory(),
        )

    @property
    def in_flight(self) -> InFlight:
        """Requests that are being forwarded."""
        return self._forwarder.in_flight

    def judge(self, query: Query) -> tuple[Verdict, ...]:
        """What would become of a request now: a verdict on every candidate."""
        return self._forwarder.judge(query)

    async def serve(
        self, listeners: Sequence[trio.SocketListener], *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve clients until cancelled; then their connections are closed."""
        for listener in listeners:
            log.info("ingress.listen", address=listener.socket.getsockname())
        task_status.started()  # clients that connect from now on wait in the backlog
        await trio.serve_listeners(self._serve_client, list(listeners))

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        try:
            handler = self.handle if self._is_open or await self._is_own(stream) else _refuse
            await serve_connection(stream, handler, limits=self._limits)
        except Exception:  # noqa: BLE001  the wall: an unexpected error ends this connection and nothing else
            log.error("handler.fail", exc_info=True)
            await trio.aclose_forcefully(stream)

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request.

        Raises:
            ApiError: what the client is told instead.
        """
        path = request.path
        if FORWARDED.fullmatch(path):
            _require(request, {"POST"})
            await self._forwarder.forward(request, responder)
        elif path in {"/health", "/ready"}:
            _require(request, _READ_METHODS)
            is_fine = path == "/health" or self._is_ready()
            await responder.json(200 if is_fine else 503, {"status": "ok" if is_fine else "not ready"})
        elif path == _MODELS:
            _require(request, _READ_METHODS)
            await responder.json(200, openai.model_list(self._entries()))
        elif path.startswith(_MODELS + "/"):
            _require(request, _READ_METHODS)
            await self._answer_model(ModelId(urllib.parse.unquote(path[len(_MODELS) + 1 :])), responder)
        else:
            raise openai.path_not_found(path)

    async def _answer_model(self, model: ModelId, responder: Responder) -> None:
        ready = self._routable(self._snapshot().models.get(model, ()))
        if not ready:
            raise openai.model_not_found(model)
        await responder.json(200, self._entry(model, ready))

    def _entries(self) -> list[dict[str, object]]:
        models = self._snapshot().models
        return [self._entry(model, ready) for model in sorted(models) if (ready := self._routable(models[model]))]

    def _routable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """A model is listed for as long as a request for it could be sent somewhere (faults.md F01)."""
        reachable = self._reachable()
        return [candidate for candidate in candidates if candidate.is_ready and candidate.node in reachable]

    def _entry(self, model: ModelId, ready: Sequence[Candidate]) -> dict[str, object]:
        return openai.model_entry(
            model,
            created_unix_s=self._started_unix_s,
            # The least that any replica takes: a client may be sent to each of them.
            max_context_tokens=min((one.max_context_tokens for one in ready if one.max_context_tokens), default=0),
            parent=next((one.parent for one in ready if one.parent), ""),
            providers={one.provider for one in ready if one.provider},
            n_replicas=len(ready),
        )


def _require(request: Request, methods: frozenset[str] | set[str]) -> None:
    if request.method not in methods:
        raise openai.method_not_allowed(request.method, ", ".join(sorted(methods)))


async def _refuse(_request: Request, _responder: Responder) -> None:
    raise openai.caller_refused(REMEDY)
