"""``make fuzz``: coverage-guided, by atheris (libFuzzer). A finding is written to the current folder as crash-*."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tela"]):
    from tests.fuzz.frames import fuzz_one

atheris.Setup(sys.argv, fuzz_one)
atheris.Fuzz()
