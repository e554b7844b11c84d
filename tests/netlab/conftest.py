"""The network lab's suite (make test-net): real processes in namespaces. Needs root; what it measured is printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netlab.net import Net

NETLAB_TIMEOUT_S = 150 if "TELA_STREAM_S" not in os.environ else 420
"""A body of 64 MB over 10 Mbit/s takes 54 s; make test-net-full has a stream of 3 minutes."""
_figures: dict[str, object] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(NETLAB_TIMEOUT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.write_line(f"measured: {json.dumps(dict(sorted(_figures.items())))}")


@pytest.fixture(scope="session")
def figures() -> dict[str, object]:
    """What a test measured, by name with its unit."""
    return _figures


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with Net() as net:
        yield net
