"""What bounds a peer's influence: a deadline on each wait, a wall around each handler (style C26, C28)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from tela.errors import DeadlineError, TelaError
from tela.net.transport import Stream, StreamHandler
from tela.observe import log
from tela.record import NodeId, short

MAX_ASKS: Final = 6
"""Of one member within ASKS_WINDOW_S: an honest one asks twice or thrice, and then each ten minutes."""
ASKS_WINDOW_S: Final = 60.0
MAX_ASKERS: Final = 4_096


class AskLimit:
    """How often each member may have us dial somewhere."""

    def __init__(self) -> None:
        self._asked: dict[NodeId, deque[float]] = {}

    def may_ask(self, peer: NodeId, now: float) -> bool:
        """Whether it may once more; counted where it may."""
        if len(self._asked) >= MAX_ASKERS:
            self._asked = {one: times for one, times in self._asked.items() if now - times[-1] < ASKS_WINDOW_S}
        times = self._asked.setdefault(peer, deque(maxlen=MAX_ASKS))
        if len(times) == MAX_ASKS and now - times[0] < ASKS_WINDOW_S:
            return False
        times.append(now)
        return True


@contextmanager
def deadline(timeout_s: float, what: str) -> Iterator[None]:
    """Give up after ``timeout_s``.

    Raises:
        DeadlineError: the time passed; the message names ``what`` was waited for.
    """
    try:
        with trio.fail_after(timeout_s):
            yield
    except trio.TooSlowError:
        raise DeadlineError(f"{what} took longer than {timeout_s:g} s") from None


async def serve_stream(handler: StreamHandler, stream: Stream, protocol: str) -> None:
    """Run ``handler`` behind the wall of streams: whatever it raises ends its own stream and nothing else."""
    try:
        await handler(stream)
    except* TelaError as group:  # the peer went away, was refused or misbehaved: normal in a mesh
        log.debug("stream.end", protocol=protocol, peer=short(stream.peer), reason=str(group.exceptions[0]))
    except* Exception as group:  # noqa: BLE001 - the wall
        log.error("handler.fail", protocol=protocol, peer=short(stream.peer), exc_info=group)
    finally:
        stream.reset()
