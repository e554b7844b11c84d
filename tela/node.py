"""One daemon: builds the parts, hands values and callables across, and owns their nursery.

Life of a session: keys and mesh up → admitted by a hub → registry synced → JOIN published → engine ready (or, without
an engine, at once) → SERVING → a signal, ``tela leave`` or the engine's end → DRAIN → requests in flight end → LEFT
gossiped → engine's tree stopped → exit code. It stops in that order because peers must know that we leave before we
cannot answer any more (faults.md F02).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Final

import trio

import tela
from tela import observe
from tela.admin import serve_admin
from tela.claims import Claims
from tela.config import NodeOptions
from tela.contact import Contact
from tela.crdt.registry import Snapshot
from tela.dump import registry_view
from tela.engine.gate import Gate
from tela.engine.report import Endpoint, InstanceReport, Whose
from tela.errors import RefusedError, TelaError, UsageError
from tela.gossip.driver import Gossip
from tela.identity import Certificate, KeyPair, is_claim_genuine, load_or_create_key, write_secret
from tela.ingress.router import Query
from tela.ingress.server import Ingress
from tela.membership import certificate_file, load_membership, revocations_file
from tela.net.admission import Admission, TokenUses
from tela.net.egress import Egress
from tela.net.known_peers import KnownPeers
from tela.net.libp2p import Libp2pMesh, open_mesh
from tela.net.links import LinkKeeper
from tela.net.multiaddrs import node_of_address
from tela.net.renewal import Renewal
from tela.net.requests import RequestClient, request_handler
from tela.net.swarmclock import SwarmClock
from tela.observe import log
from tela.profile import Profile
from tela.record import InstanceState, ModelId, NodeId, Role, SessionState, short
from tela.revocation import Revocations, read_revocations
from tela.startup import make_supervisor, open_http
from tela.status import model_views, node_views, route_view
from tela.targets import Targets
from tela.views import ChangesView, RegistryView, RouteView, Status
from tela.whereabouts import Whereabouts
from tela.wire import GOSSIP_PROTOCOL, HTTP_PROTOCOL, encode

ADMISSION_PATIENCE_S: Final = 5.0
"""An engine does not wait longer than this for a hub that cannot be reached: its weights load meanwhile."""
SYNC_TIMEOUT_S: Final = 5.0
"""A first exchange of the registry takes a round trip; without an answer by then the node goes on alone (F04)."""
LEAVE_TIMEOUT_S: Final = 2.0
"""For peers to acknowledge LEFT; Slurm kills 30 s after TERM, and the engine needs most of them."""
REVOKED_GRACE_S: Final = 1.0
"""A revoked node goes on relaying for so long: where it is a hub, others hear of it through it alone."""
DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def run_node(options: NodeOptions) -> int:
    """Run a daemon until it has left.

    Returns:
        Its exit code: 0 where it was asked to stop, else the engine's (design/engine.md, Life).

    Raises:
        TelaError: it could not start, or no hub admitted it.
    """
    try:
        return trio.run(_run, options)
    except BaseExceptionGroup as group:
        # Nurseries wrap whatever ends them; what the user must read is the one error inside.
        ours, others = group.split(TelaError)
        if ours is None or others is not None:
            raise
        raise _first_leaf(ours) from group


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _run(options: NodeOptions) -> int:
    key = load_or_create_key(options.paths.node_dir / "node.key")
    known = KnownPeers(options.paths.node_dir / "known-peers.json", now=_unix_s)
    hubs = {*known.hubs(), *map(node_of_address, options.invite.hubs)}
    egress = Egress(options.proxies, hubs.__contains__)
    async with (
        open_mesh(key, options.listen, advertise=options.advertise, choice=options.choice, egress=egress) as mesh,
        trio.open_nursery() as nursery,
    ):
        node = Node(options, key, mesh, nursery, known=known, hubs=hubs)
        code = await node.live()
        nursery.cancel_scope.cancel()
    log.info("node.stop", code=code)
    if node.last_words:
        print(f"tela: {node.last_words}", file=sys.stderr)  # noqa: T201
    return code


class Node:
    """The parts of one daemon, and the life of its session. It adds to ``hubs`` whom the registry certifies as one."""

    def __init__(
        self,
        options: NodeOptions,
        key: KeyPair,
        mesh: Libp2pMesh,
        nursery: trio.Nursery,
        *,
        known: KnownPeers,
        hubs: set[NodeId],
    ) -> None:
        self._options = options
        self._known = known
        self._hubs = hubs
        self._key = key
        self._mesh = mesh
        self._nursery = nursery
        self._rng = random.Random()  # noqa: S311 - spreads load and back-off; no secret depends on it
        self._started_s = trio.current_time()
        self._state = SessionState.JOIN
        self._report: InstanceReport | None = None
        self._base_url = ""
        self._has_spoken = False
        self._admitted = trio.Event()
        self._ended = trio.Event()
        self._exit_code = 0
        self.last_words = ""  # for people: whose the exit code is
        self._failure: TelaError | None = None
        self._is_departing = False
        self._patience = trio.CancelScope()
        earliest_unix_s = options.invite.token.not_before_unix_s
        self._clock = SwarmClock(_unix_s, monotonic=trio.current_time, earliest_unix_s=earliest_unix_s)
        self._profile = Profile(options.name, options.words, os.environ)
        self._join_mesh()
        self._serve_models()

    def _join_mesh(self) -> None:
        """Make what keeps us in the swarm; nothing runs yet."""
        invite = self._options.invite
        membership = load_membership(self._options, self._key, now=int(_unix_s()))
        self._admission = Admission(
            self._mesh,
            membership,
            clock=self._clock,
            uses=TokenUses(self._options.paths.node_dir / "token-uses.json"),
            on_certificate=self._keep_certificate,
            on_proof=lambda raw: self._gossip.revoke(raw),
        )
        self._gossip = Gossip(
            self._mesh,
            self._key,
            invite.swarm,
            invite.ca,
            now=self._clock.now,
            rng=self._rng,
            on_change=self._on_snapshot,
            on_revocations=self._on_revocations,
        )
        self._renewal = Renewal(self._mesh, self._admission, now=self._clock.now, rng=self._rng)
        self._targets = Targets(
            own=self._key.public,
            hubs=invite.hubs,
            revoked=lambda: self._admission.membership.revoked.nodes,
            snapshot=lambda: self._gossip.snapshot,
            remembered=lambda: self._contact.targets(),
        )
        self._links = LinkKeeper(
            self._mesh,
            self._admission,
            targets=self._targets.links,
            hubs=frozenset(node_of_address(address) for address in invite.hubs),
            on_link=self._on_link,
            on_refused=self._on_refused,
            rng=self._rng,
        )
        self._contact = Contact(
            is_linked=lambda: any(self._admission.certificate_of(peer) for peer in self._mesh.peers()),
            failures=lambda: self._links.failures,
            known=self._known,
            has_hubs=bool(self._targets.other_hubs()),
        )
        self._whereabouts = Whereabouts(
            self._mesh,
            self._admission,
            is_hub=self._options.is_hub,
            is_called=self._options.role is Role.INGRESS,
            choice=self._options.choice,
            trusts_claims=not self._targets.other_hubs(),
            addresses_of=lambda hub: self._targets.links().get(hub, ()),
            now=self._clock.now,
            on_change=self._publish_again,
        )
        self._mesh.handle(GOSSIP_PROTOCOL, self._admission.members_only(self._gossip.handler))

    def _serve_models(self) -> None:
        """Make what requests pass through; nothing runs yet."""
        invite = self._options.invite
        self._client = RequestClient(self._mesh)
        self._gate = Gate(
            endpoint_of=self._endpoint_of,
            is_genuine=lambda claim: is_claim_genuine(invite.swarm, claim),
            now=self._clock.now,
        )
        self._ingress = Ingress(
            snapshot=lambda: self._gossip.snapshot,
            reachable=self._mesh.peers,
            doubted=lambda: self._gossip.doubted,
            client=self._client,
            claim=Claims(self._key, invite.swarm, session=lambda: self._gossip.session, now=self._clock.now).present,
            on_dead=self._gossip.suspect,
            rng=self._rng,
            is_ready=self.is_ready,
            now=self._clock.now,
            is_open=self._options.is_open,
        )
        engine = self._options.engine
        self._supervisor = make_supervisor(engine, on_change=self._on_report, rng=self._rng) if engine else None
        if self._supervisor:
            serve_calls = self._admission.members_only(request_handler(self._gate.handle), role=Role.INGRESS)
            self._mesh.handle(HTTP_PROTOCOL, serve_calls)

    # -- life --------------------------------------------------------------------------------------------------------

    async def live(self) -> int:
        """Run until the session has left; returns the exit code.

        Raises:
            TelaError: it could not start, or no hub admitted it.
        """
        log.info("node.start", node=short(self._key.public), name=self._options.name, version=tela.__version__)
        self._nursery.start_soon(self._watch_signals)
        for serve in (self._admission.serve, self._gossip.serve, self._client.serve, self._renewal.serve):
            await self._nursery.start(serve)
        if known := self._admission.membership.revoked.raw:
            self._gossip.revoke(known)  # gossip must spread what we alone may remember
        if self._options.role is Role.INGRESS:
            listeners, self._base_url = await open_http(self._options.http)
            await self._nursery.start(self._ingress.serve, listeners)
        await self._nursery.start(serve_admin, self._options.paths.socket, self)
        await self._nursery.start(self._links.serve)
        await self._nursery.start(self._contact.serve)
        await self._nursery.start(self._whereabouts.serve)
        self._nursery.start_soon(self._work)
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    async def _work(self) -> None:
        await self._join_swarm()
        if self._supervisor is None:
            self._enter(SessionState.SERVING)
            self._say_serving()
            return
        self._publish()
        report = await self._supervisor.serve()
        if not self._is_departing:
            await self._gossip.leave(LEAVE_TIMEOUT_S)
            owner = "the engine" if report.whose is Whose.ENGINE else "tela"
            self.last_words = f"{report.text}; exit code {report.exit_code} is {owner}'s"
        self._end(report.exit_code)

    async def _join_swarm(self) -> None:
        """Be admitted and know the registry, or go on alone: contact comes back by itself (F07, G04)."""
        if not self._targets.other_hubs():
            return
        with trio.move_on_after(ADMISSION_PATIENCE_S):  # lost: nothing, links are tried for ever
            await self._admitted.wait()
            await self._gossip.wait_synced(SYNC_TIMEOUT_S)

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*DRAIN_SIGNALS) as signals:
            async for number in signals:
                log.info("node.drain", signal=signal.Signals(number).name)
                if self._is_departing:
                    self._patience.cancel()  # a second signal: do not wait for requests any more
                else:
                    self._nursery.start_soon(self._depart, self._options.drain_s)

    async def _depart(self, patience_s: float) -> None:
        """Leave the swarm, then stop the engine; requests in flight have ``patience_s`` to end."""
        if self._is_departing:
            return
        self._is_departing = True
        await self.drain()
        with self._patience:
            self._patience.deadline = trio.current_time() + patience_s
            await self._gate.in_flight.wait_idle()
            await self._ingress.in_flight.wait_idle()
        n_told = await self._gossip.leave(LEAVE_TIMEOUT_S)
        log.info("node.left", n_told=n_told)
        if self._supervisor and self._options.engine:
            self._gate.close()  # an engine that ends politely waits for idle connections too
            await self._supervisor.stop(self._options.engine.grace_s)
        self._end(0)

    def _end(self, exit_code: int, failure: TelaError | None = None) -> None:
        if not self._ended.is_set():
            self._exit_code, self._failure = exit_code, failure
            self._ended.set()

    # -- what the parts tell ------------------------------------------------------------------------------------------

    def _enter(self, state: SessionState) -> None:
        """Move the session forward; a step back is ignored (invariant I7)."""
        if state > self._state:
            self._state = state
            self._publish()

    def _publish(self) -> None:
        card, catalog = self._profile.records(
            certificate=self._admission.membership.certificate,
            addresses=self._whereabouts.announced,
            report=self._report,
            http_url=self._base_url,
        )
        self._has_spoken = True
        self._gossip.publish(self._state, card, catalog)

    def _on_report(self, report: InstanceReport) -> None:
        was_serving = self._state >= SessionState.SERVING
        self._report = report
        if report.state is InstanceState.READY and not was_serving:
            self._enter(SessionState.SERVING)
            self._say_serving()
        else:
            self._publish()

    def _endpoint_of(self, instance: int) -> Endpoint | None:
        return self._report.endpoint if self._report and instance == self._report.instance else None

    async def _on_link(self, peer: NodeId, certificate: Certificate) -> None:
        self._admitted.set()
        addresses = self._targets.links().get(peer, ())
        if addresses:
            self._known.remember(peer, addresses, is_hub=Role.HUB in certificate.roles)
        async with trio.open_nursery() as nursery:
            if Role.HUB in certificate.roles:
                nursery.start_soon(self._whereabouts.stand_by, peer)
            await self._gossip.link(peer)
            nursery.cancel_scope.cancel()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._hubs.update(member.node for member in snapshot.members.values() if Role.HUB in member.roles)

    def _on_refused(self, error: TelaError) -> None:
        """A node that was never admitted ends here; one that was goes on (a hub may have lost its keys for a while)."""
        if not self._admitted.is_set():
            self._end(error.exit_code, error)

    def _publish_again(self) -> None:
        """The card is another one; nobody waits for it before we have spoken, be that word still on its way."""
        if self._has_spoken:
            self._publish()

    def _keep_certificate(self, certificate: Certificate) -> None:
        write_secret(certificate_file(self._options.paths), encode(certificate))
        self._publish_again()  # a renewal: the card must prove us for longer

    def _on_revocations(self, revoked: Revocations) -> None:
        self._admission.revoke(revoked)
        write_secret(revocations_file(self._options.paths), revoked.raw)
        log.info("revocation.take", version=revoked.version, n_revoked=len(revoked.items))
        try:
            revoked.check_node(self._key.public)
            if certificate := self._admission.membership.certificate:
                revoked.check_certificate(certificate)
        except RefusedError as error:
            self._gate.drain()
            self._nursery.start_soon(self._end_revoked, error)

    async def _end_revoked(self, error: RefusedError) -> None:
        await trio.sleep(REVOKED_GRACE_S)  # a hub may be the only one to tell its peers
        self._end(error.exit_code, error)

    # -- what the owner sees and does: tela.admin.Backend --------------------------------------------------------------

    def status(self) -> Status:
        """The daemon, and the swarm as it sees it."""
        snapshot = self._gossip.snapshot
        certificate = self._admission.membership.certificate
        links = self._mesh.peers()
        return Status(
            version=tela.__version__,
            pid=os.getpid(),
            name=self._options.name,
            node=short(self._key.public),
            swarm=short(self._options.invite.swarm),
            roles=certificate.roles if certificate else (),
            state=self._state.name.lower(),
            uptime_s=round(trio.current_time() - self._started_s, 1),
            n_links=len(links),
            n_inflight=self._gate.in_flight.n + self._ingress.in_flight.n,
            base_url=self._base_url,
            addresses=tuple(self._mesh.addresses),
            reach=self._whereabouts.view(is_unreachable=self._contact.is_unreachable),
            nodes=node_views(
                snapshot,
                own=self._key.public,
                paths=self._mesh.paths(),
                reasons={**self._links.failures, **self._whereabouts.relayed_because},
                last_seen_s=self._mesh.silence_s(),
            ),
            models=model_views(snapshot, reachable=links if self._base_url else None),
            warnings=(
                *self._options.warnings,
                *self._profile.warnings,
                *self._clock.warnings,
                *self._contact.warnings(),
            ),
        )

    def route(self, model: str, allowlist: frozenset[str] | None) -> RouteView:
        """Who would get a request.

        Raises:
            UsageError: we are no ingress.
        """
        if not self._base_url:
            raise UsageError("it is no ingress and routes nothing")
        verdicts = self._ingress.judge(Query(ModelId(model), allowlist))
        return route_view(model, verdicts, self._gossip.snapshot)

    def registry(self) -> RegistryView:
        """Our whole replica."""
        return registry_view(
            self._gossip.map,
            self._gossip.snapshot,
            swarm=self._options.invite.swarm,
            own=self._key.public,
            name=self._options.name,
            unix_s=self._clock.now(),
        )

    def changes(self) -> ChangesView:
        """What changed lately in what the registry shows."""
        return ChangesView(changes=self._gossip.changes)

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return observe.render_metrics()

    def is_ready(self) -> bool:
        """Whether it serves: synced, not alone and, for a worker, with an engine that is ready."""
        return self._state is SessionState.SERVING and not self._contact.is_unreachable

    def invite_hubs(self) -> tuple[str, ...]:
        """Addresses of hubs for new invites: our own, and those that the registry knows."""
        ours = self._mesh.addresses if self._options.is_hub else ()
        return tuple(dict.fromkeys([*ours, *self._targets.known_hubs()]))

    async def drain(self) -> None:
        """Take nothing new from now on."""
        self._gate.drain()
        self._enter(SessionState.DRAIN)

    def revocations(self) -> bytes:
        """The CA's list of what it took back, as it is in force here; b"" where there is none."""
        return self._admission.membership.revoked.raw

    async def revoke(self, raw: bytes) -> None:
        """Take in and spread a list that was signed on this host.

        Raises:
            ProtocolError: it is no list.
            IntegrityError: the CA of this swarm did not sign it.
        """
        read_revocations(raw, swarm=self._options.invite.swarm, ca=self._options.invite.ca)
        self._gossip.revoke(raw)

    async def leave(self) -> None:
        """Start to leave; the end of the control socket is the end."""
        if not self._is_departing:
            self._nursery.start_soon(self._depart, self._options.drain_s)

    def _say_serving(self) -> None:
        """One line for people: what runs, and what to do next. Logs go to stderr as well, answers to stdout."""
        models = ", ".join(sorted({model.id for model in self._report.models} if self._report else ()))
        what = f"serving {models}" if models else f"OpenAI API at {self._base_url}" if self._base_url else "hub is up"
        following = "tela invite create" if self._options.is_hub else f"tela status --name {self._options.name}"
        print(f"tela: {what} as node {short(self._key.public)}; next: {following}", file=sys.stderr)  # noqa: T201


def _unix_s() -> float:
    return time.time()  # noqa: TID251 - the one place where the daemon reads the wall clock
