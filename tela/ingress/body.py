"""What the ingress reads of a body: ``model`` and ``stream``, and nothing else. The bytes themselves are never touched.

JSON is not decoded: a scanner walks over the members of the top-level object and jumps over everything nested, in
linear time and without recursion, so a prompt full of images costs what finding its quotes costs. It checks no more
than it needs to find the right ``model``: what it lets pass, the engine still judges. But where two parsers could read
two different models, it refuses (faults.md B02).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tela.ingress import openai
from tela.ingress.multipart import FormField, read_fields
from tela.ingress.openai import ApiError
from tela.record import ModelId

MAX_DEPTH: Final = 200
"""Nesting of brackets, the top-level object included; engines' own parsers give up at about 1,000."""
MAX_MODEL_BYTES: Final = 4096
"""Of ``model`` as written; names in the registry have at most 256 bytes, an escape has six for one."""
MAX_KEY_BYTES: Final = 64
"""A longer key cannot be one of those that are read, even with each letter escaped."""
UTF8_STEP_BYTES: Final = 1024 * 1024

_READ_KEYS: Final = frozenset({"model", "stream"})
# Characters are repeated possessively: nothing is tried twice. Groups are not, since before Python 3.11.5 a possessive
# group could end one byte too far (CPython gh-106052); their repetitions are bounded instead, since each keeps state.
_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
_COLON: Final = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
_SEPARATOR: Final = re.compile(rb"[ \t\n\r]*+([,}])[ \t\n\r]*+")
_SCALAR: Final = re.compile(rb"[-+.0-9A-Za-z]++")
_ESCAPES: Final = re.compile(rb'(?:[^"\\]*+\\.){0,512}', re.DOTALL)
# Inside nested values: anything but brackets, and short plain strings; long ones are left to bytes.find.
_FILLER: Final = re.compile(rb'(?:[^"\[\]{}]++|"[^"\\]{0,256}+"){0,512}')
_CLOSER: Final = {ord("["): ord("]"), ord("{"): ord("}")}


@dataclass(frozen=True, slots=True)
class BodyFields:
    """What routing needs to know of a request."""

    model: ModelId
    is_stream: bool


def read_body(body: bytes, content_type: bytes) -> BodyFields:
    """Find the model that a body names.

    Raises:
        ApiError: 400, no model is named, or the body is malformed.
    """
    if content_type.lower().startswith(b"multipart/"):
        return _fields_of_form(read_fields(body, content_type))
    return read_json(body)


def _fields_of_form(form: dict[str, list[FormField]]) -> BodyFields:
    models = form.get("model", [])
    if len(models) > 1:
        raise openai.invalid("more than one part named model", code="invalid_multipart", param="model")
    if not models:
        raise _missing_model()
    stream = form.get("stream", [])
    return BodyFields(ModelId(models[0]), bool(stream) and stream[0].lower() in {"true", "1"})


def _missing_model() -> ApiError:
    return openai.invalid("the request names no model", code="missing_required_parameter", param="model")


def read_json(body: bytes) -> BodyFields:
    """Find ``model`` and ``stream`` in a JSON object.

    Raises:
        ApiError: 400, no model is named, or the body is malformed.
    """
    _check_utf8(body)
    values: dict[str, tuple[int, int]] = {}
    for key, start, end in _members(body):
        name = _read_key(key)
        if name in values:
            raise openai.invalid(f"more than one {name}", param=name)
        if name in _READ_KEYS:
            values[name] = (start, end)
    if "model" not in values:
        raise _missing_model()
    start, end = values.get("stream", (0, 0))
    return BodyFields(_read_model(body, *values["model"]), body[start:end] == b"true")


def _check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    # A sequence that is cut off at the end of the body is left to the scanner: no object ends with one.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), UTF8_STEP_BYTES):
            decoder.decode(body[start : start + UTF8_STEP_BYTES])
    except UnicodeDecodeError as error:
        raise _invalid_json(f"it is not UTF-8: {error.reason}") from None


def _read_key(key: bytes) -> str:
    """The key's name; "" where it cannot be one of those that are read."""
    if len(key) > MAX_KEY_BYTES:
        return ""
    return _decode_string(key) if b"\\" in key else key[1:-1].decode()


def _read_model(body: bytes, start: int, end: int) -> ModelId:
    if body[start : start + 1] != b'"':
        raise openai.invalid("model must be a string", param="model")
    if end - start > MAX_MODEL_BYTES:
        raise openai.invalid(f"model is longer than {MAX_MODEL_BYTES} bytes", param="model")
    return ModelId(_decode_string(body[start:end]))


def _decode_string(text: bytes) -> str:
    try:
        value: str = json.loads(text)
    except ValueError:
        raise _invalid_json("malformed string") from None
    return value


def _invalid_json(reason: str) -> ApiError:
    return openai.invalid(f"the body is not a JSON object: {reason}", code="invalid_json")


# -- the scanner ------------------------------------------------------------------------------------------------------


def _members(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The key, quotes included, and the extent of the value of each member of the top-level object."""
    start = _after(_SPACE, body, 0)
    if body[start : start + 1] != b"{":
        raise _invalid_json(f"expected {{ at byte {start}")
    position = _after(_SPACE, body, start + 1)
    is_open = body[position : position + 1] != b"}"
    position += not is_open
    while is_open:
        if body[position : position + 1] != b'"':
            raise _invalid_json(f"expected a key at byte {position}")
        key_end = _string_end(body, position)
        colon = _COLON.match(body, key_end)
        if colon is None:
            raise _invalid_json(f"expected a colon at byte {key_end}")
        end = _value_end(body, colon.end())
        yield body[position:key_end], colon.end(), end
        separator = _SEPARATOR.match(body, end)
        if separator is None:
            raise _invalid_json(f"expected , or }} at byte {end}")
        is_open, position = separator[1] == b",", separator.end()
    if _after(_SPACE, body, position) != len(body):
        raise _invalid_json(f"there is more after its end, at byte {position}")


def _after(pattern: re.Pattern[bytes], body: bytes, position: int) -> int:
    """Where repetitions of a pattern end that matches nothing at all, too."""
    while (match := pattern.match(body, position)) and match.end() > position:
        position = match.end()
    return position


def _value_end(body: bytes, position: int) -> int:
    first = body[position : position + 1]
    if first == b'"':
        return _string_end(body, position)
    if first in {b"[", b"{"}:
        return _nested_end(body, position)
    match = _SCALAR.match(body, position)
    if match is None:
        raise _invalid_json(f"expected a value at byte {position}")
    return match.end()


def _string_end(body: bytes, position: int) -> int:
    start = position + 1
    quote = body.find(b'"', start)
    if quote >= 0 and body[quote - 1] != ord("\\"):
        return quote + 1  # by far the most strings, and the longest, hold no quote: memchr finds their end
    quote = body.find(b'"', _after(_ESCAPES, body, start))
    if quote < 0:
        raise _invalid_json(f"the string at byte {position} does not end")
    return quote + 1


def _nested_end(body: bytes, start: int) -> int:
    closers = bytearray()
    position = start
    while True:
        position = _after(_FILLER, body, position)
        char = body[position] if position < len(body) else 0
        if char == ord('"'):
            position = _string_end(body, position)
            continue
        if char in _CLOSER:
            closers.append(_CLOSER[char])
            if len(closers) >= MAX_DEPTH:
                raise _invalid_json(f"it is nested deeper than {MAX_DEPTH}")
        elif not char or closers.pop() != char:
            raise _invalid_json(f"the value at byte {start} does not end well")
        position += 1
        if not closers:
            return position
