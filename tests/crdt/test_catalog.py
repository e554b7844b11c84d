"""Models that find no room in a card: where they go, and that readers find them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tela.crdt.catalog import services_of, split
from tela.crdt.registry import Change
from tela.record import (
    MAX_CATALOG_BYTES,
    MAX_RECORD_BYTES,
    MAX_SERVICES,
    MAX_SERVICES_BYTES,
    Card,
    Catalog,
    InstanceState,
    Job,
    Kind,
    Listing,
    Service,
)
from tela.wire import decode_catalog, encode
from tests.crdt.test_registry import A, View
from tests.lab.statements import NOW, card, raw_envelope, raw_record

FACTS = Catalog("node17", "ops@example.org", Job("alps", "4711", "gpu", 1_800_000_000), ("rack=12",))

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=200).filter(
    lambda text: len(text.encode()) <= 256
)
services = st.lists(
    st.builds(
        Service,
        st.integers(0, 3),
        st.just("vllm"),
        names,
        st.just(InstanceState.READY),
        st.integers(0, 1 << 20),
        st.just(""),
        st.just("") | names,
    ),
    max_size=120,
    unique_by=lambda service: (service.instance, service.model),
)


@given(services)
def test_whatever_models_there_are_both_records_fit_and_none_is_counted_twice(given_services: list[Service]) -> None:
    shared = split(given_services, FACTS)
    found = services_of(Card(services=shared.services), shared.catalog)
    assert len(found) + shared.n_lost == len(given_services)
    assert set(found) <= set(given_services)
    assert len(shared.services) <= MAX_SERVICES
    assert sum(len(encode(service)) for service in shared.services) <= MAX_SERVICES_BYTES
    raw = encode(shared.catalog)
    assert len(raw) <= MAX_CATALOG_BYTES
    assert decode_catalog(raw) == shared.catalog
    if shared.services:
        assert {one.instance for one in found} == {one.instance for one in shared.services}


def test_two_hundred_adapters_of_common_names_are_all_announced() -> None:
    base = Service(0, "vllm", "meta-llama/Llama-3.1-8B-Instruct", InstanceState.READY, 131_072)
    adapters = [Service(0, "vllm", f"lora-{n:03}", InstanceState.READY, 131_072, "", base.model) for n in range(200)]
    shared = split([base, *adapters], FACTS)
    assert shared.n_lost == 0
    assert len(raw_envelope(A, encode(shared.catalog), kind=Kind.CATALOG)) < MAX_RECORD_BYTES


def test_listed_models_are_routable_with_the_state_of_their_instance() -> None:
    catalog = Catalog(listings=(Listing(0, 4096, "llama", ("lora-1", "lora-2")), Listing(7, 0, "", ("nobody's",))))
    view = View()
    view.merge(raw_record(A, models=("llama",)), raw_envelope(A, encode(catalog), kind=Kind.CATALOG))
    snapshot = view.registry.apply(
        [Change(A, view.map.node(A), view.map.certificate_of(A), view.map.catalog(A))], unix_s=NOW
    )
    assert sorted(snapshot.models) == ["llama", "lora-1", "lora-2"]
    (candidate,) = snapshot.models["lora-2"]
    assert (candidate.is_ready, candidate.parent, candidate.max_context_tokens) == (True, "llama", 4096)


def test_catalog_that_cannot_be_read_leaves_the_card_as_it_is() -> None:
    view = View()
    view.merge(raw_record(A, models=("llama",)), raw_envelope(A, b"no catalog", kind=Kind.CATALOG))
    snapshot = view.registry.apply(
        [Change(A, view.map.node(A), view.map.certificate_of(A), view.map.catalog(A))], unix_s=NOW
    )
    assert sorted(snapshot.models) == ["llama"]
    assert snapshot.members[A].card == card(A, "llama")
