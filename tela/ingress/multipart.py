"""Text fields of a multipart/form-data body (RFC 7578), found in place: the body is forwarded byte for byte.

Files are passed over without a copy, wherever they stand in the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tela.ingress import openai
from tela.ingress.openai import ApiError

MAX_PART_HEAD_BYTES: Final = 8 * 1024
"""Headers of one part: a disposition with a long file name."""
MAX_FIELD_BYTES: Final = 4096
"""Of a field that is read."""
MAX_PARTS: Final = 1000
"""Parts of one form; the API's largest has about twenty."""
READ_FIELDS: Final = frozenset({"model", "stream"})

_BOUNDARY: Final = re.compile(rb';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER: Final = re.compile(rb"\s*;\s*([!#$%&'*+.^_`|~\w-]+)=(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s\"]*))")
_DELIMITER_END: Final = re.compile(rb"(--)?[ \t]*\r\n|--\Z")

FormField = str


def read_fields(body: bytes, content_type: bytes) -> dict[str, list[FormField]]:
    """The values of the fields in READ_FIELDS, by name.

    Raises:
        ApiError: 400 ``invalid_multipart``.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise _malformed("no boundary in the content type")
    fields: dict[str, list[FormField]] = {}
    for name, start, end in _parts(body, b"--" + (match[1] or match[2])):
        if name not in READ_FIELDS:
            continue
        if end - start > MAX_FIELD_BYTES:
            raise _malformed(f"the part {name} is longer than {MAX_FIELD_BYTES} bytes")
        fields.setdefault(name, []).append(_text(body[start:end]))
    return fields


def _malformed(reason: str) -> ApiError:
    return openai.invalid(f"malformed multipart body: {reason}", code="invalid_multipart")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _malformed("a field is not UTF-8") from None


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[str, int, int]]:
    """Name and extent of the content of each part."""
    # The first delimiter may stand at the very start, the others follow a line break that belongs to them.
    begin = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    if begin < 0:
        raise _malformed("no delimiter")
    position, is_last = _after_delimiter(body, body.index(delimiter, begin) + len(delimiter))
    n_parts = 0
    while not is_last:
        n_parts += 1
        if position < 0 or n_parts > MAX_PARTS:
            raise _malformed("bad delimiter, or too many parts")
        start = _content_start(body, position)
        name = _part_name(body[position:start])
        end, position, is_last = _next_delimiter(body, start, b"\r\n" + delimiter)
        yield name, start, end


def _after_delimiter(body: bytes, position: int) -> tuple[int, bool]:
    """Where the line of a delimiter ends and whether it was the last one; -1 where it is none."""
    match = _DELIMITER_END.match(body, position)
    if match is None:
        return -1, False
    return match.end(), body.startswith(b"--", position)


def _next_delimiter(body: bytes, start: int, delimiter: bytes) -> tuple[int, int, bool]:
    search_from = start
    while True:
        end = body.find(delimiter, search_from)
        if end < 0:
            raise _malformed("it ends without its last delimiter")
        position, is_last = _after_delimiter(body, end + len(delimiter))
        if position >= 0:
            return end, position, is_last
        search_from = end + len(delimiter)  # content that only looks like a delimiter


def _content_start(body: bytes, position: int) -> int:
    # A part without headers starts with the empty line itself.
    end = body.find(b"\r\n\r\n", position - 2, position + MAX_PART_HEAD_BYTES)
    if end < 0:
        raise _malformed("a part without the end of its head")
    return end + 4


def _part_name(head: bytes) -> str:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            return _disposition_name(value)
    return ""


def _disposition_name(value: bytes) -> str:
    position = len(value.partition(b";")[0])
    while match := _PARAMETER.match(value, position):
        if match[1].lower() == b"name":
            return _text(match[2] if match[2] is not None else match[3])
        position = match.end()
    return ""
