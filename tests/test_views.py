import json

import msgspec
import pytest

from tela.views import ModelView, NodeView, Report, Status, parse_status, report_schema

STATUS = Status(
    version="0.1.0",
    pid=7,
    name="worker",
    node="a1b2c3d4",
    swarm="00112233",
    roles=("worker",),
    state="serving",
    uptime_s=1.5,
    nodes=(NodeView(node="a1b2c3d4", state="serving", models=("m",)),),
    models=(ModelView(model="m", n_ready=1, n_replicas=2, providers=("eth",)),),
)


def test_parse_status_of_own_json_is_the_same_value():
    assert parse_status(msgspec.json.encode(STATUS)) == STATUS


def test_parse_status_of_newer_daemon_ignores_its_fields():
    newer = json.loads(msgspec.json.encode(STATUS)) | {"field_of_2030": [1]}
    assert parse_status(json.dumps(newer).encode()) == STATUS


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 1}', b"<html>"])
def test_parse_status_of_something_else_is_an_error(content):
    with pytest.raises(msgspec.DecodeError):
        parse_status(content)


@pytest.mark.parametrize(("model", "n_ready"), [("m", 1), ("M", 0), ("", 0)])
def test_n_ready_counts_exactly_the_model_named(model, n_ready):
    assert STATUS.n_ready(model) == n_ready


def test_report_is_one_object_with_a_schema_version():
    value = json.loads(msgspec.json.encode(Report(daemons=(STATUS,))))
    assert value["schema_version"] == 1
    assert value["daemons"][0]["models"][0] == {
        "model": "m",
        "n_ready": 1,
        "n_replicas": 2,
        "providers": ["eth"],
        "max_context_tokens": 0,
    }


def test_report_schema_names_every_field_that_json_has():
    definitions = report_schema()["$defs"]
    assert set(json.loads(msgspec.json.encode(STATUS))) == set(definitions["Status"]["properties"])
