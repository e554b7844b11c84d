"""Logs and metrics of the shells; cores notify, they never log.

Events are data: a dotted ``noun.verb`` out of :data:`EVENTS` with fields, on stderr (stdout is for answers), JSON where
stderr is no terminal or ``TELA_LOG=json``. Never prompts, completions, keys or headers. Metrics are all declared here,
with help text and bounded labels; docs/reference/metrics.md is generated from this file.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

EVENTS: Final = frozenset(
    {
        "admission.admit",  # a hub certified or recognised a member
        "admission.join",  # we were admitted
        "admission.refuse",  # a hub refused a peer
        "admission.refused",  # we were refused
        "certificate.renew",  # ours was renewed
        "certificate.retry",  # nobody renewed ours yet: at warning where it ends within a day
        "catalog.full",  # the engine has more models than our records can name
        "circuit.accept",  # somebody calls us through a relay: debug only
        "circuit.refuse",  # this relay could not call a node for another
        "circuit.retry",  # a hub takes no reservation of ours
        "engine.exit",
        "engine.ready",
        "engine.restart",
        "engine.start",
        "engine.stop",
        "engine.down",
        "engine.wait",  # still loading: at debug each new reason, at info once a minute
        "gate.refuse",
        "gossip.close",  # the core ended a gossip stream, with the reason
        "gossip.drop",  # a peer's facts were dropped, with the reason
        "gossip.session",  # we go on under a new session
        "gossip.vote",  # we signed that a peer is suspect or down
        "handler.fail",  # the wall: an unexpected error ended one stream or request
        "ingress.listen",
        "ingress.request",  # audit line: who, which model, which provider, status; no prompt
        "link.down",
        "link.retry",
        "link.up",
        "member.change",
        "mesh.listen",
        "mesh.slow",  # the record layer could not be taken over: everything works, at four times the CPU
        "node.drain",
        "node.isolated",  # no link to any member: once a minute, with the reasons
        "node.left",
        "node.start",
        "node.stop",
        "peers.file",  # the file of known peers was read, or cannot be
        "punch.done",  # a relayed peer is reached directly now
        "punch.fail",  # it is not, and why
        "reach.change",  # what we announce is another set of addresses now
        "reach.retry",  # a member did not dial our addresses for us: debug only
        "revocation.take",  # the CA took something back: a new list is in force here
        "stream.end",  # a mesh stream broke: debug only
    }
)


def configure(level: str = "info") -> None:
    """Send events to stderr: JSON lines, or readable ones on a terminal. ``level`` is debug, info, warning or error."""
    as_json = os.environ.get("TELA_LOG") == "json" or not sys.stderr.isatty()
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


log: Any = structlog.get_logger()
"""``log.info("link.up", peer=short(node))``. INFO: an operator would act on it or want history; DEBUG: a message."""

REGISTRY: Final = CollectorRegistry(auto_describe=True)

ingress_requests = Counter(
    "tela_ingress_requests_total", "Requests answered by this ingress.", ["model", "status"], registry=REGISTRY
)
ingress_attempts = Counter(
    "tela_ingress_attempts_total",
    "Attempts at an instance, by how they ended: ok, refused, dead, error.",
    ["result"],
    registry=REGISTRY,
)
ingress_inflight = Gauge("tela_ingress_inflight_requests", "Requests in flight at this ingress.", registry=REGISTRY)
ingress_first_byte = Histogram(
    "tela_ingress_first_byte_seconds",
    "From a parsed request to the first byte of its answer.",
    registry=REGISTRY,
    buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
gate_requests = Counter(
    "tela_gate_requests_total", "Requests that the gate took from the mesh, by end.", ["result"], registry=REGISTRY
)
gate_inflight = Gauge("tela_gate_inflight_requests", "Requests in flight at this node's engines.", registry=REGISTRY)
links = Gauge("tela_links", "Live links to members.", registry=REGISTRY)
reservations = Gauge("tela_relay_reservations", "Nodes that can be called through this hub.", registry=REGISTRY)
punches = Counter(
    "tela_punches_total",
    "Attempts at a direct path to a relayed peer, by what became of them.",
    ["result"],
    registry=REGISTRY,
)
circuits = Gauge("tela_relay_circuits", "Circuits through this hub.", registry=REGISTRY)
members = Gauge("tela_members", "Members that the registry shows as live.", registry=REGISTRY)
gossip_records = Counter(
    "tela_gossip_records_total",
    "Facts from peers, by what became of them: see tela.crdt.gmap.Outcome.",
    ["result"],
    registry=REGISTRY,
)
gossip_sent_bytes = Counter("tela_gossip_sent_bytes_total", "Bytes of gossip frames sent.", registry=REGISTRY)
admissions = Counter("tela_admissions_total", "Admission decisions of this hub, by code.", ["code"], registry=REGISTRY)


def render_metrics() -> bytes:
    """The Prometheus text exposition of everything above."""
    return generate_latest(REGISTRY)
