"""Style as an ordinary test: sizes, names, leftovers (style A11, A12, A38)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (
    sorted((ROOT / "tela").rglob("*.py"))
    + sorted((ROOT / "tests").rglob("*.py"))
    + sorted((ROOT / "scripts").rglob("*.py"))
)
PRODUCT = [path for path in SOURCES if path.is_relative_to(ROOT / "tela")]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_POSITIONAL = 6
"""Parameters without self and without keyword-only ones."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc", "manager"}
LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_function_fits_on_a_screen(path: Path) -> None:
    for function in functions(path):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"
        positional = [a for a in function.args.posonlyargs + function.args.args if a.arg not in {"self", "cls"}]
        assert len(positional) <= MAX_POSITIONAL, f"{function.name} takes {len(positional)} positional parameters"


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_product_holds_no_leftovers(path: Path) -> None:
    assert not LEFTOVERS.search(path.read_text())


@pytest.mark.parametrize("path", PRODUCT, ids=relative)
def test_no_pattern_repeats_a_group_possessively(path: Path) -> None:
    """Before Python 3.11.5 such a group could end one byte too far (CPython gh-106052)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            assert not re.search(r"\)[*+?]\+", text)


def test_type_ignores_are_counted_and_only_fall() -> None:
    n_ignores = sum(path.read_text().count("# type: ignore[") for path in PRODUCT)
    assert n_ignores <= 12


def test_events_logged_are_declared() -> None:
    from tela.observe import EVENTS

    logged = {
        name
        for path in PRODUCT
        for name in re.findall(r"\b(?:log\.(?:debug|info|warning|error)|tell)\(\s*\"([^\"]+)\"", path.read_text())
    }
    assert logged <= EVENTS, f"undeclared: {sorted(logged - EVENTS)}"
