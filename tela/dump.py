"""The whole replica as operators see it: which facts a node holds, not only what they amount to."""

from __future__ import annotations

from tela.crdt.delta import Key
from tela.crdt.gmap import GossipMap
from tela.crdt.lattice import Entry
from tela.crdt.registry import Snapshot
from tela.record import Kind, NodeId, short
from tela.views import EntryView, RegistryView, VoteView


def registry_view(
    gossip_map: GossipMap, snapshot: Snapshot, *, swarm: bytes, own: NodeId, name: str, unix_s: float
) -> RegistryView:
    """Every entry of our replica, by owner and kind."""
    keys = sorted(gossip_map)
    return RegistryView(
        swarm=short(swarm),
        node=short(own),
        name=name,
        unix_s=unix_s,
        root=f"{gossip_map.digest.root:016x}",
        entries=tuple(_entry_view(key, entry, snapshot, unix_s) for key in keys if (entry := gossip_map.get(key))),
    )


def _entry_view(key: Key, entry: Entry, snapshot: Snapshot, unix_s: float) -> EntryView:
    member = snapshot.members.get(key.owner)
    return EntryView(
        node=key.owner.hex(),
        kind=_kind(key.kind),
        name=member.card.name if member and member.card else "",
        provider=member.provider if member else "",
        status=entry.status_at(unix_s).value if key.kind == Kind.NODE else "",
        session=entry.rec.session,
        version=entry.rec.version,
        incarnation=entry.ref.incarnation,
        floor=entry.floor,
        issued_unix_s=entry.rec.issued_unix_s,
        end_unix_s=entry.end_unix_s,
        size_bytes=len(entry.rec.raw),
        fingerprint=entry.fingerprint().hex(),
        votes=tuple(
            VoteView(
                observer=short(vote.observer),
                kind=vote.kind.name.lower(),
                session=vote.session,
                incarnation=vote.incarnation,
                issued_unix_s=vote.issued_unix_s,
            )
            for vote in entry.votes
        ),
    )


def _kind(kind: int) -> str:
    try:
        return Kind(kind).name.lower()
    except ValueError:
        return str(kind)
