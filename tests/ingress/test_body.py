"""Finding ``model`` in bodies: as json.loads would, or refused; forms in any order."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.ingress.body import MAX_DEPTH, BodyFields, read_body, read_json
from tela.ingress.openai import ApiError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r\n")])


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_json(body)
    assert caught.value.status == 400
    return caught.value


def outcome(body: bytes, content_type: bytes = b"application/json") -> BodyFields | ApiError:
    try:
        return read_body(body, content_type)
    except ApiError as error:
        return error


def is_orderly(found: BodyFields | ApiError) -> bool:
    return isinstance(found, BodyFields) or found.status == 400


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=6), st.text(), json_values, st.booleans(), separators)
def test_model_is_what_json_loads_finds(
    others: dict[str, Any], model: str, stream: Any, is_ascii: bool, separator: tuple[str, str]
) -> None:
    value = others | {"model": model, "stream": stream}
    body = json.dumps(value, ensure_ascii=is_ascii, separators=separator).encode("utf-8", "surrogatepass")
    try:
        found = json.loads(body)
    except UnicodeDecodeError:
        refused(body)
        return
    assert read_json(body) == BodyFields(found["model"], found["stream"] is True)


@given(st.text(alphabet='{}[]",:\\ \nmodelstrau0123456789.eE+-NIfy', max_size=60))
def test_what_is_refused_is_refused_by_json_loads_too(text: str) -> None:
    body = ('{"model":"m"' + text).encode()
    error = outcome(body)
    if isinstance(error, BodyFields):
        return
    try:
        names = [key for key, _ in json.loads(body, object_pairs_hook=list)]
    except ValueError:
        return
    assert error.code != "invalid_json"
    assert names.count("model") > 1 or names.count("stream") > 1


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_read_or_refused(noise: bytes) -> None:
    assert is_orderly(outcome(noise))
    assert is_orderly(outcome(b'{"model":"m",' + noise))


ODD = [
    (b'{"model":"m","x":1e400,"y":12345678901234567890,"z":0.1000}', "m"),
    (b'{"model":"m","temperature":NaN,"x":-Infinity}', "m"),
    (b'{"messages":[{"content":"\\ud800"}],"model":"m"}', "m"),
    (b'{"model":"\\u00e9\\/x"}', "\u00e9/x"),
    ('{"model":"é"}'.encode(), "\u00e9"),
    (b'{"\\u006dodel":"m"}', "m"),
    (b'{"x":{"model":"inner"},"model":"m"}', "m"),
    (b'{"x":"\\"model\\":\\"no\\"","model":"m"}', "m"),
    (b' \n{"model":"m"}\r\n', "m"),
    (b'{"":"","model":""}', ""),
]


@pytest.mark.parametrize(("body", "model"), ODD)
def test_odd_but_legal_json_is_read(body: bytes, model: str) -> None:
    assert read_json(body).model == model


REFUSED = [
    (b'{"model":"allowed","model":"secret"}', "invalid_request"),
    (b'{"model":"allowed","\\u006dodel":"secret"}', "invalid_request"),
    (b'{"model":"m","stream":true,"stream":false}', "invalid_request"),
    (b'{"model":1}', "invalid_request"),
    (b'{"model":"' + b"x" * 5000 + b'"}', "invalid_request"),
    (b'{"messages":[]}', "missing_required_parameter"),
    (b"{}", "missing_required_parameter"),
    (b"", "invalid_json"),
    (b"[]", "invalid_json"),
    (b'"model"', "invalid_json"),
    (b'{"model":"m"} x', "invalid_json"),
    (b'{"model":"m",}', "invalid_json"),
    (b'{"model":"m" "x":1}', "invalid_json"),
    (b'{"model":"m","x":}', "invalid_json"),
    (b'{"model":"m","x":[}', "invalid_json"),
    (b'{"model":"m","x":[[]', "invalid_json"),
    (b'{"model":"m","x":"', "invalid_json"),
    (b'{"model":"m","x":["\\"', "invalid_json"),
    (b'{"model":"\\x"}', "invalid_json"),
    (b'{"model":"m\xff"}', "invalid_json"),
    (b'\xff\xfe{"model":"m"}', "invalid_json"),
    (b'\xef\xbb\xbf{"model":"m"}', "invalid_json"),
    (b'{"model":"m","x":"\xc3', "invalid_json"),
]


@pytest.mark.parametrize(("body", "code"), REFUSED, ids=lambda value: repr(value)[:40])
def test_ambiguous_or_malformed_json_is_refused(body: bytes, code: str) -> None:
    assert refused(body).code == code


@pytest.mark.parametrize(("n_brackets", "is_fine"), [(MAX_DEPTH - 2, True), (MAX_DEPTH, False), (100_000, False)])
def test_nesting_is_bounded(n_brackets: int, is_fine: bool) -> None:
    body = b'{"model":"m","x":' + b"[" * n_brackets + b"]" * n_brackets + b"}"
    started = time.process_time()
    if is_fine:
        assert read_json(body).model == "m"
    else:
        assert refused(body).code == "invalid_json"
    assert time.process_time() - started < 1


def test_utf8_is_checked_over_the_edges_of_its_steps() -> None:
    text = "é" * 1_500_000
    assert read_json(json.dumps({"model": "m", "x": "a" + text}, ensure_ascii=False).encode()).model == "m"


@pytest.mark.parametrize("unit", [b'\\"', b"\\\\", b"[],", b'"",', b"a"])
def test_time_is_linear_in_the_body(unit: bytes) -> None:
    def seconds(n_units: int) -> float:
        body = b'{"model":"m","x":"' + unit * n_units + b'","y":[' + unit * n_units
        times = []
        for _ in range(3):
            started = time.process_time()
            refused(body)
            times.append(time.process_time() - started)
        return min(times)

    # Eight times the bytes may cost eight times the time; quadratic work would cost 64 times as much.
    assert seconds(80_000) < 30 * max(seconds(10_000), 0.0005)


# -- forms ------------------------------------------------------------------------------------------------------------

FORM = b"multipart/form-data; boundary=XyZ"
FILE = bytes(range(256)) + b"\r\n--Xy\r\n--XyZz--XyZ\r\n" + b"\r\n"
FILE_PART = (
    b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="a; name=\\"model\\".wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\n" + FILE + b"\r\n"
)
MODEL_PART = b'--XyZ\r\ncontent-disposition: form-data; name="model"\r\n\r\norg/M\r\n'
END = b"--XyZ--\r\n"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (FILE_PART + MODEL_PART + END, FORM),
        (MODEL_PART + FILE_PART + END, FORM),
        (b"preamble\r\n" + MODEL_PART + b"--XyZ--", FORM),
        (b"--XyZ\r\n\r\nno headers\r\n" + MODEL_PART + END, FORM),
        (MODEL_PART.replace(b'"model"', b"model") + END, FORM),
        (MODEL_PART + END, b'Multipart/Form-Data; charset=utf-8; boundary="XyZ"'),
    ],
)
def test_model_is_found_in_a_form_wherever_it_stands(body: bytes, content_type: bytes) -> None:
    assert read_body(body, content_type) == BodyFields("org/M", is_stream=False)


def test_stream_is_found_in_a_form() -> None:
    part = b'--XyZ\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
    assert read_body(MODEL_PART + part + END, FORM) == BodyFields("org/M", is_stream=True)


def test_empty_file_and_empty_field_are_read() -> None:
    part = b'--XyZ\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n'
    assert read_body(part + MODEL_PART.replace(b"org/M", b"") + END, FORM).model == ""


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (FILE_PART + END, FORM, "missing_required_parameter"),
        (MODEL_PART + MODEL_PART + END, FORM, "invalid_multipart"),
        (MODEL_PART, FORM, "invalid_multipart"),
        (MODEL_PART + FILE_PART, FORM, "invalid_multipart"),
        (b"", FORM, "invalid_multipart"),
        (MODEL_PART + END, b"multipart/form-data", "invalid_multipart"),
        (b"--XyZ\r\nno head" + END, FORM, "invalid_multipart"),
        (MODEL_PART.replace(b"org/M", b"\xff") + END, FORM, "invalid_multipart"),
        (MODEL_PART.replace(b"org/M", b"x" * 5000) + END, FORM, "invalid_multipart"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_form_is_refused(body: bytes, content_type: bytes, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(body, content_type)
    assert (caught.value.status, caught.value.code) == (400, code)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_file_content_is_passed_over(before: bytes, after: bytes) -> None:
    def file_part(content: bytes) -> bytes:
        return b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename=x\r\n\r\n' + content + b"\r\n"

    assert read_body(file_part(before) + MODEL_PART + file_part(after) + END, FORM).model == "org/M"


@given(st.binary(max_size=200))
def test_arbitrary_forms_are_read_or_refused(noise: bytes) -> None:
    assert all(
        is_orderly(outcome(body, FORM)) for body in (noise, b"--XyZ\r\n" + noise + END, MODEL_PART + b"--XyZ" + noise)
    )
