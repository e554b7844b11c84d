"""Questions that tela itself asks an engine: health, models, one canary request. The only importer of httpx.

Requests of users never come this way: they go through :mod:`tela.engine.gate`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from tela.engine.report import Endpoint, ModelInfo
from tela.errors import EngineError
from tela.record import MAX_STRING_BYTES, clipped

PROBE_TIMEOUT_S: Final = 5.0
CANARY_TIMEOUT_S: Final = 60.0
"""The first request of an engine may compile kernels."""
MAX_MODELS: Final = 512
"""More names than fit into a card and a catalog together."""
_MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""A model list with hundreds of adapters is far below this; an answer above it is not a model list."""
_CANARIES: Final[tuple[tuple[str, Mapping[str, Any]], ...]] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "hi"}),
)
"""One cheap request of each kind. A 4xx means that the model is of another kind: base models have no chat template."""


class Prober:
    """Asks one engine at one endpoint."""

    def __init__(self, client: httpx.AsyncClient, *, health_path: str, models_path: str) -> None:
        self._client = client
        self._health_path = health_path
        self._models_path = models_path

    async def health(self) -> int:
        """Status of the health path.

        Raises:
            EngineError: no answer.
        """
        return (await self._ask("GET", self._health_path)).status_code

    async def version(self, path: str, key: str) -> str:
        """What the engine calls its version; "" where it does not tell: nothing depends on it."""
        try:
            answer = await self._ask("GET", path)
            return clipped(str(answer.json()[key])) if answer.status_code == 200 else ""
        except (EngineError, ValueError, KeyError, TypeError):
            return ""

    async def models(self) -> tuple[ModelInfo, ...]:
        """What the engine serves, at most MAX_MODELS entries, names that do not fit on the wire left out.

        Raises:
            EngineError: no answer, or not a model list.
        """
        answer = await self._ask("GET", self._models_path)
        if answer.status_code != 200:
            raise EngineError(f"GET {self._models_path} answers {answer.status_code}")
        try:
            entries = answer.json()["data"]
            found = {model.id: model for entry in entries for model in read_models(entry)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"GET {self._models_path} answers no model list") from error
        return tuple(found.values())[:MAX_MODELS]

    async def canary(self, model: str) -> None:
        """One real request for one token. Passes, too, where the engine refuses every kind we can ask for.

        Raises:
            EngineError: no answer, a server error, or our key was refused.
        """
        for path, body in _CANARIES:
            answer = await self._ask("POST", path, {"model": model, **body})
            if answer.status_code < 400:
                return
            if answer.status_code >= 500 or answer.status_code in {401, 403, 429}:
                raise EngineError(f"canary request: POST {path} answers {answer.status_code}")

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        timeout_s = CANARY_TIMEOUT_S if body else PROBE_TIMEOUT_S
        try:
            answer = await self._client.request(method, path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if len(answer.content) > _MAX_ANSWER_BYTES:
            raise EngineError(f"{method} {path} answers {len(answer.content)} bytes")
        return answer


@asynccontextmanager
async def open_prober(endpoint: Endpoint, *, health_path: str, models_path: str) -> AsyncIterator[Prober]:
    """A prober for ``endpoint``. Proxies of the environment are for the world outside, never for loopback."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    base_url = f"http://{host}:{endpoint.port}"
    async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False) as client:
        yield Prober(client, health_path=health_path, models_path=models_path)


def read_models(entry: Mapping[str, Any]) -> Iterator[ModelInfo]:
    """The names of one entry of a model list: its id and, with llama.cpp, its aliases."""
    meta = entry.get("meta") or {}
    n_tokens = entry.get("max_model_len") or meta.get("n_ctx") or entry.get("context_length") or 0
    parent = entry.get("parent") or ""
    for name in (entry["id"], *entry.get("aliases", ())):
        if 0 < len(name.encode()) <= MAX_STRING_BYTES and len(parent.encode()) <= MAX_STRING_BYTES:
            yield ModelInfo(name, max_context_tokens=int(n_tokens), parent=parent)
