"""How a node's models are split between its card, which is sent again and again, and its catalog, sent once a session.

A card holds the first of them, at least one of each instance; what finds no room is listed in the catalog by name
alone: kind and state are those of its instance, so that an engine that goes down changes the card only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from tela.record import MAX_CATALOG_BYTES, MAX_SERVICES, MAX_SERVICES_BYTES, Card, Catalog, Listing, Service
from tela.wire import encode

_NAME_OVERHEAD: Final = 3
"""Bytes of a string in MessagePack beside its text, at most."""
_GROUP_OVERHEAD: Final = 24
_ROUNDING: Final = 8
"""For headers of arrays, which grow with them."""


class Split(NamedTuple):
    """Where services go; ``n_lost`` of them found no room at all."""

    services: tuple[Service, ...]
    catalog: Catalog
    n_lost: int


def split(services: Sequence[Service], facts: Catalog) -> Split:
    """Share services out.

    Args:
        services: of all instances.
        facts: the rest of the catalog, which takes its room first.
    """
    shown = _fitting(_first_of_each(services))
    carded = set(shown)
    listed = [service for service in services if service not in carded]
    known = {service.instance for service in shown}
    kept: list[Service] = []
    n_bytes = len(encode(facts)) + _ROUNDING
    for service in sorted(listed, key=_group):
        more = len(service.model.encode()) + _NAME_OVERHEAD
        if not kept or _group(service) != _group(kept[-1]):
            more += len(service.parent.encode()) + _GROUP_OVERHEAD
        if service.instance in known and n_bytes + more <= MAX_CATALOG_BYTES:
            kept.append(service)
            n_bytes += more
    listings = tuple(
        Listing(instance, n_tokens, parent, tuple(service.model for service in those))
        for (instance, n_tokens, parent), those in groupby(kept, key=_group)
    )
    return Split(shown, msgspec.structs.replace(facts, listings=listings), len(listed) - len(kept))


def services_of(card: Card, catalog: Catalog) -> tuple[Service, ...]:
    """All services of a node: those of its card, and what the catalog lists of their instances."""
    of_instance = {service.instance: service for service in card.services}
    listed = (
        msgspec.structs.replace(
            of_instance[listing.instance],
            model=model,
            max_context_tokens=listing.max_context_tokens,
            parent=listing.parent,
        )
        for listing in catalog.listings
        if listing.instance in of_instance
        for model in listing.models
    )
    return (*card.services, *listed)


def _group(service: Service) -> tuple[int, int, str]:
    return (service.instance, service.max_context_tokens, service.parent)


def _first_of_each(services: Sequence[Service]) -> list[Service]:
    """The same, with one of each instance in front."""
    first = {service.instance: service for service in reversed(services)}
    return [*first.values(), *(service for service in services if first[service.instance] is not service)]


def _fitting(services: Iterable[Service]) -> tuple[Service, ...]:
    kept: list[Service] = []
    n_bytes = 0
    for service in services:
        n_bytes += len(encode(service))
        if len(kept) == MAX_SERVICES or n_bytes > MAX_SERVICES_BYTES:
            break
        kept.append(service)
    return tuple(kept)
