"""A fake inference engine: an OpenAI-shaped HTTP server of the standard library with switches for every fault.

Run as a process: ``python tests/lab/fake_engine.py --port 8000 --model m,alias --tokens 5``.  With ``--log FILE`` it
appends one JSON line per event: start, child, request (with the raw head and the body's hash), finish, disconnect, each
with ``at_s`` of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

CHILD_LIFE_S = 60.0
HANG_S = 3600.0
REASONS = {200: "OK", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}


class ClientGoneError(Exception):
    """The client closed its connection."""


class Log:
    """One JSON line per event, whole lines only."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(path, flags, 0o600) if path else None

    def write(self, event: str, **fields: Any) -> None:
        if self._descriptor is not None:
            line = json.dumps({"event": event, "at_s": time.monotonic(), "pid": os.getpid(), **fields})
            os.write(self._descriptor, line.encode() + b"\n")


class Connection:
    """One client: requests one after another until either side closes."""

    ids = itertools.count(1)

    def __init__(self, sock: socket.socket, options: argparse.Namespace, log: Log, started_s: float) -> None:
        self.sock = sock
        self.options = options
        self.log = log
        self.started_s = started_s
        self.reader: BinaryIO = sock.makefile("rb")
        self.request_id = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        try:
            while self.serve_one():
                pass
        except (ClientGoneError, OSError) as error:
            self.log.write("disconnect", id=self.request_id, error=str(error))
        finally:
            self.reader.close()
            self.sock.close()

    def serve_one(self) -> bool:
        """Answer one request; False where the connection ended between requests."""
        if self.options.keepalive and not select.select([self.sock], [], [], self.options.keepalive)[0]:
            return False
        raw_head = self.read_head()
        if not raw_head:
            return False
        lines = raw_head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
        named = {name.lower(): value for name, value in headers}
        body = self.read_body(named)
        self.request_id = next(self.ids)
        facts = {"method": method, "target": target, "headers": headers, "raw_head": raw_head.decode("latin-1")}
        digest = hashlib.sha256(body).hexdigest()
        self.log.write("request", id=self.request_id, **facts, body_bytes=len(body), body_sha256=digest)
        self.answer(method, target.split("?")[0], named, body)
        self.log.write("finish", id=self.request_id)
        return True

    def read_head(self) -> bytes:
        lines = []
        while line := self.reader.readline():
            lines.append(line)
            if line == b"\r\n":
                return b"".join(lines)
        return b""

    def read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.reader.read(int(headers.get("content-length", "0")))
        parts = []
        while size := int(self.reader.readline(), 16):
            parts.append(self.reader.read(size))
            self.reader.readline()
        self.reader.readline()
        return b"".join(parts)

    # -- answering ---------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        age_s = time.monotonic() - self.started_s
        if path == "/health":
            self.answer_health(age_s)
        elif self.options.api_key and headers.get("authorization") != f"Bearer {self.options.api_key}":
            self.send_json(401, {"error": "Unauthorized"})
        elif path == "/v1/models":
            self.answer_models(age_s)
        elif method == "POST":
            self.answer_post(path, headers, body)
        else:
            self.send_error(404, f"no route {method} {path}")

    def answer_health(self, age_s: float) -> None:
        if self.options.health_mode == "hang":
            self.wait(HANG_S)
        is_early = age_s < self.options.health_delay
        status = 503 if is_early else {"ok": 200, "503": 503, "404": 404}[self.options.health_mode]
        self.send_head(status, [("Content-Length", "0")])

    def answer_models(self, age_s: float) -> None:
        names = [] if age_s < self.options.models_delay else served_models(self.options)
        limit = self.options.max_model_len
        data = [{"id": name, "object": "model", "owned_by": "fake", "max_model_len": limit} for name in names]
        self.send_json(200, {"object": "list", "data": data})

    def answer_post(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.wait(self.options.first_byte_delay)
        if self.options.status != 200:
            self.send_error(self.options.status, "told to fail")
        elif self.options.echo_sha:
            self.send_json(200, {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}, headers)
        else:
            request = json.loads(body or b"{}")
            if request.get("stream"):
                self.send_stream(path, request)
            else:
                self.wait(self.options.token_interval * self.options.tokens)
                self.send_json(200, whole_answer(path, request, self.options.tokens), headers)

    def send_stream(self, path: str, request: dict[str, Any]) -> None:
        head = [("Content-Type", "text/event-stream; charset=utf-8"), ("Transfer-Encoding", "chunked")]
        self.send_head(200, head)
        die_after, manner = self.options.die_after or (None, "")
        for index in range(self.options.tokens):
            if die_after is not None and index == int(die_after):
                return self.die(manner)
            self.send_event(json.dumps(chunk(path, request, f"t{index} ")))
            self.wait(self.options.token_interval)
        self.send_event(json.dumps(chunk(path, request, "", finish_reason="stop")))
        is_asked = (request.get("stream_options") or {}).get("include_usage", False)
        if self.options.usage == "always" or (self.options.usage == "ask" and is_asked):
            usage_chunk = chunk(path, request, "") | {"choices": [], "usage": usage(self.options.tokens)}
            self.send_event(json.dumps(usage_chunk))
        self.send_event("[DONE]")
        return self.send_bytes(b"0\r\n\r\n")

    def die(self, manner: str) -> None:
        """End a stream before its end: by RST, by FIN, or with a proper last chunk but without [DONE]."""
        if manner == "clean":
            return self.send_bytes(b"0\r\n\r\n")
        if manner == "rst":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise OSError(f"told to die by {manner}")

    def send_event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        pieces = list(split(event, self.options.split))
        for piece in pieces:
            self.send_bytes(b"%x\r\n%s\r\n" % (len(piece), piece))

    def send_error(self, status: int, message: str) -> None:
        self.send_json(status, {"error": {"message": message, "type": "fake_error", "code": status}})

    def send_json(self, status: int, value: object, request_headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        headers = [("Content-Type", "application/json")]
        if self.options.gzip and "gzip" in (request_headers or {}).get("accept-encoding", ""):
            body = gzip.compress(body)
            headers.append(("Content-Encoding", "gzip"))
        if self.options.retry_after is not None and status >= 400:
            headers.append(("Retry-After", str(self.options.retry_after)))
        self.send_head(status, [*headers, ("Content-Length", str(len(body)))])
        self.send_bytes(body)

    def send_head(self, status: int, headers: list[tuple[str, str]]) -> None:
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Told So')}", "Server: fake", f"X-Fake-Pid: {os.getpid()}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.send_bytes("\r\n".join([*lines, "", ""]).encode())

    def send_bytes(self, data: bytes) -> None:
        self.sock.sendall(data)

    def wait(self, delay_s: float) -> None:
        """Sleep, but notice a client that goes away."""
        if delay_s <= 0:
            return
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        if poller.poll(delay_s * 1000):
            raise ClientGoneError("client closed the connection")


# -- what is answered -------------------------------------------------------------------------------------------------


def served_models(options: argparse.Namespace) -> list[str]:
    """The models of the command line and, one a line, of ``--models-file`` as it is now."""
    names = list(options.model.split(","))
    if options.models_file and os.path.exists(options.models_file):  # noqa: PTH110
        with open(options.models_file) as file:  # noqa: PTH123
            names += file.read().split()
    return names


def usage(n_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 3, "completion_tokens": n_tokens, "total_tokens": 3 + n_tokens}


def chunk(path: str, request: dict[str, Any], text: str, finish_reason: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    is_chat = path.endswith("chat/completions")
    choice |= {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "fake-1", "object": kind, "created": 1, "model": request.get("model", ""), "choices": [choice]}


def whole_answer(path: str, request: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    model, text = request.get("model", ""), "".join(f"t{index} " for index in range(n_tokens))
    answer: dict[str, Any] = {"id": "fake-1", "created": 1, "model": model, "usage": usage(n_tokens)}
    if path.endswith("chat/completions"):
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return answer | {"object": "chat.completion", "choices": choices}
    if path.endswith("embeddings"):
        return answer | {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}]}
    return answer | {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}


def split(data: bytes, manner: str | None) -> Iterator[bytes]:
    """``data`` in pieces of N bytes, of random sizes, or whole."""
    chance = random.Random(1)
    while data:
        size = len(data) if manner is None else chance.randint(1, 40) if manner == "random" else int(manner)
        yield data[:size]
        data = data[size:]


# -- the process ------------------------------------------------------------------------------------------------------


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--listen-port", type=int, help="listen here and ignore --port")
    add("--model", default="fake", help="M or M,alias,...")
    add("--models-file", help="more model names, read at each /v1/models")
    add("--max-model-len", type=int, default=4096)
    add("--listen-delay", type=float, default=0.0, help="bind after S seconds")
    add("--health-delay", type=float, default=0.0, help="/health is 503 for S seconds")
    add("--models-delay", type=float, default=0.0, help="/v1/models is empty for S seconds")
    add("--health-mode", choices=("ok", "503", "404", "hang"), default="ok")
    add("--first-byte-delay", type=float, default=0.0)
    add("--token-interval", type=float, default=0.0)
    add("--tokens", type=int, default=5)
    add("--die-after", nargs=2, metavar=("N", "rst|fin|clean"), help="break each stream after N tokens")
    add("--status", type=int, default=200, help="answer every POST with this status")
    add("--retry-after", type=int)
    add("--gzip", action="store_true", help="compress answers where the client accepts it")
    add("--split", help="N or random: bytes per HTTP chunk of a stream")
    add("--keepalive", type=float, default=0.0, help="close connections idle for S seconds")
    add("--fork-children", choices=("ignore-term",), help="double-fork a descendant that lives 60 s and ignores TERM")
    add("--ignore-term", action="store_true")
    add("--exit-after", type=float, help="exit S seconds after the start, with --exit-code")
    add("--exit-code", type=int, default=0, help="on TERM and --exit-after; -N dies by signal N")
    add("--stderr-file", help="copy this file to stderr at the start")
    add("--echo-sha", action="store_true", help="answer every POST with the hash of the body it got")
    add("--usage", choices=("ask", "always", "never"), default="ask")
    add("--api-key")
    add("--log", help="append events here as JSON lines")
    return parser.parse_args(arguments)


def fork_stubborn_descendant(log: Log) -> None:
    """A grandchild in its own session, re-parented at once, deaf to TERM."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log.write("child")
    time.sleep(CHILD_LIFE_S)
    os._exit(0)


def leave(exit_code: int) -> None:
    if exit_code < 0:
        if -exit_code != signal.SIGKILL:
            signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


def set_signals(options: argparse.Namespace) -> None:
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: leave(options.exit_code))
        signal.signal(signal.SIGINT, lambda *_: leave(options.exit_code))


def main() -> None:
    options = parse_options()
    log = Log(options.log)
    if options.stderr_file:
        with open(options.stderr_file) as file:  # noqa: PTH123
            sys.stderr.write(file.read())
    if options.fork_children:
        fork_stubborn_descendant(log)
    set_signals(options)
    if options.exit_after is not None:
        # The alarm's handler runs in the main thread, the only one that may set signal handlers.
        signal.signal(signal.SIGALRM, lambda *_: leave(options.exit_code))
        signal.setitimer(signal.ITIMER_REAL, max(options.exit_after, 0.001))
    time.sleep(options.listen_delay)
    started_s = time.monotonic()
    port = options.port if options.listen_port is None else options.listen_port
    listener = socket.create_server((options.host, port), backlog=512)
    log.write("start", port=listener.getsockname()[1])
    while True:
        sock, _ = listener.accept()
        connection = Connection(sock, options, log, started_s)
        threading.Thread(target=connection.serve, daemon=True).start()


if __name__ == "__main__":
    main()
