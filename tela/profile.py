"""What this node tells the swarm of itself: facts of its host, its allocation and its engine, words of its owner."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tela
from tela.config import Words
from tela.crdt.catalog import split
from tela.engine.report import InstanceReport
from tela.hardware import find_hardware
from tela.identity import Certificate
from tela.job import find_job
from tela.observe import log
from tela.record import Card, Catalog, clipped
from tela.wire import encode


class Profile:
    """Looks at the host once, when it is made, and makes our records.

    Args:
        name: of this daemon.
        words: of its owner.
        environ: what the batch system and the owner of the host say.
    """

    def __init__(self, name: str, words: Words, environ: Mapping[str, str]) -> None:
        self._name = name
        self._words = words
        self._hardware, warning = find_hardware(environ)
        self._warnings = (warning,) if warning else ()
        self._job, self._end_unix_s = find_job(environ)
        self._host = clipped(os.uname().nodename)
        self._n_lost = 0

    @property
    def warnings(self) -> Sequence[str]:
        """For people."""
        lost = f"{self._n_lost} models of the engine are not announced: their names do not fit into our records"
        return (*self._warnings, lost) if self._n_lost else self._warnings

    def records(
        self,
        *,
        certificate: Certificate | None,
        addresses: Sequence[str],
        report: InstanceReport | None,
        http_url: str,
    ) -> tuple[Card, Catalog]:
        """What to publish now."""
        words = self._words
        facts = Catalog(host=self._host, contact=words.contact, job=self._job, labels=words.labels)
        shared = split(report.services() if report else (), facts)
        if shared.n_lost != self._n_lost:
            log.warning("catalog.full", n_lost=shared.n_lost)
        self._n_lost = shared.n_lost
        card = Card(
            certificate=encode(certificate) if certificate else b"",
            addresses=tuple(addresses),
            services=shared.services,
            hardware=self._hardware,
            end_unix_s=self._end_unix_s,
            version=tela.__version__,
            name=self._name,
            http_url=http_url,
            instances=(report.facts,) if report else (),
            price=words.price,
            tier=words.tier,
        )
        return card, shared.catalog
