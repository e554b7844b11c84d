"""A fixed number of short requests by the real SDK, each with what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai

from scripts.demo.local_swarm import LocalSwarm


@dataclass(frozen=True)
class Outcome:
    """Of one request: who answered after how many attempts, or the error that the client saw."""

    asked_s: float  # on the monotonic clock
    node: str = ""
    attempts: int = 0
    error: str = ""


def sdk(swarm: LocalSwarm) -> openai.OpenAI:
    """The official SDK, without retries of its own."""
    return openai.OpenAI(base_url=swarm.base_url, api_key="none", max_retries=0, timeout=60)


def ask_once(swarm: LocalSwarm, model: str) -> Outcome:
    """One short question by a client of its own."""
    with sdk(swarm) as client:
        return ask(client, model)


def ask(client: openai.OpenAI, model: str) -> Outcome:
    """One short question, not streamed."""
    asked_s = time.monotonic()
    try:
        answer = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": "Say yes."}], max_tokens=2
        )
    except openai.OpenAIError as error:
        return Outcome(asked_s, error=f"{type(error).__name__} {getattr(error, 'code', '')}: {error}")
    if not answer.parse().choices:
        return Outcome(asked_s, error="an answer without choices")
    return Outcome(asked_s, answer.headers["x-tela-node"], int(answer.headers["x-tela-attempts"]))


def ask_many(
    swarm: LocalSwarm,
    model: str,
    *,
    n_requests: int,
    n_parallel: int = 4,
    disturb: Callable[[], object] | None = None,
    disturb_after: int = 0,
) -> list[Outcome]:
    """``n_requests`` requests; ``disturb`` is called once, when ``disturb_after`` of them have been answered."""
    answered = threading.Semaphore(0)

    def one(_: int) -> Outcome:
        outcome = ask(client, model)
        answered.release()
        return outcome

    with sdk(swarm) as client, ThreadPoolExecutor(n_parallel) as pool:
        outcomes: Iterator[Outcome] = pool.map(one, range(n_requests))
        if disturb is not None:
            for _ in range(disturb_after):
                answered.acquire()
            disturb()
        return list(outcomes)
