"""Probes of a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tela.engine.probe import open_prober, read_models
from tela.engine.report import Endpoint, ModelInfo
from tela.errors import EngineError
from tests.lab.engines import FakeEngine, running_fake


def prober(fake: FakeEngine, api_key: str = "", models_path: str = "/v1/models"):
    endpoint = Endpoint("127.0.0.1", fake.port, api_key)
    return open_prober(endpoint, health_path="/health", models_path=models_path)


@pytest.mark.parametrize(
    ("entry", "models"),
    [
        ({"id": "m", "max_model_len": 4096, "parent": None}, [ModelInfo("m", 4096)]),
        ({"id": "a", "max_model_len": 4096, "parent": "m"}, [ModelInfo("a", 4096, "m")]),
        (
            {"id": "m", "aliases": ["m", "n"], "meta": {"n_ctx": 512}},
            [ModelInfo("m", 512), ModelInfo("m", 512), ModelInfo("n", 512)],
        ),
        ({"id": "m"}, [ModelInfo("m")]),
        ({"id": "x" * 257}, []),
    ],
)
def test_entry_of_a_model_list_is_read(entry: dict, models: list[ModelInfo]) -> None:
    assert list(read_models(entry)) == models


async def test_probes_never_use_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with running_fake(tmp_path, "--model", "m") as fake, prober(fake) as asked:
        assert await asked.health() == 200
        assert await asked.models() == (ModelInfo("m", 4096),)


async def test_canary_costs_one_token_and_carries_the_engines_key(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--api-key", "k") as fake:
        async with prober(fake, api_key="k") as asked:
            await asked.canary("m")
        async with prober(fake, api_key="wrong") as asked:
            with pytest.raises(EngineError, match="401"):
                await asked.canary("m")
            with pytest.raises(EngineError, match="401"):
                await asked.models()


@pytest.mark.parametrize(("status", "passes"), [("404", True), ("400", True), ("500", False), ("429", False)])
async def test_canary_passes_where_the_engine_serves_another_kind(tmp_path: Path, status: str, passes: bool) -> None:
    async with running_fake(tmp_path, "--status", status) as fake, prober(fake) as asked:
        if passes:
            await asked.canary("m")
            assert len(fake.log.events("request")) == 3
        else:
            with pytest.raises(EngineError, match=status):
                await asked.canary("m")


async def test_silence_is_an_engine_error(tmp_path: Path) -> None:
    async with running_fake(tmp_path) as fake, prober(fake, models_path="/health") as asked:
        with pytest.raises(EngineError, match="no model list"):
            await asked.models()
        fake.process.kill()
        fake.process.wait()
        with pytest.raises(EngineError, match="GET /health"):
            await asked.health()
