"""What the card says of an instance."""

from __future__ import annotations

from tela.engine.report import InstanceReport, ModelInfo
from tela.record import MAX_SERVICES, Instance, InstanceState, Service


def test_services_are_one_a_model() -> None:
    models = tuple(ModelInfo(f"m{index}", 4096, "base") for index in range(MAX_SERVICES + 1))
    report = InstanceReport(
        instance=3, kind="vllm", state=InstanceState.DOWN, models=models, reason="exited 1", facts=Instance(3)
    )
    services = report.services()
    assert len(services) == len(models)
    assert services[0] == Service(3, "vllm", "m0", InstanceState.DOWN, 4096, "exited 1", "base")
