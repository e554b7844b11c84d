"""Runs ``async def`` tests under trio and offers a clock that jumps (style A47: no sleeps).

pytest-trio would do; these lines need no plugin whose last release is of 2022 (style.md 3.4).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import settings

settings.register_profile("tela", deadline=None, max_examples=50)
settings.load_profile("tela")


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A clock that jumps to the next deadline when every task waits."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    clock = arguments.get("autojump_clock")
    trio.run(functools.partial(pyfuncitem.obj, **arguments), clock=clock, strict_exception_groups=True)
    return True
