"""What the card says of an instance."""

from __future__ import annotations

from tela.engine.report import InstanceReport, ModelInfo
from tela.record import MAX_SERVICES, InstanceState, Service


def test_services_are_one_a_model_and_as_many_as_fit() -> None:
    models = tuple(ModelInfo(f"m{index}", 4096, "base") for index in range(MAX_SERVICES + 1))
    report = InstanceReport(instance=3, kind="vllm", state=InstanceState.DOWN, models=models, reason="exited 1")
    services = report.services()
    assert len(services) == MAX_SERVICES
    assert services[0] == Service(3, "vllm", "m0", InstanceState.DOWN, 4096, "exited 1", "base")
