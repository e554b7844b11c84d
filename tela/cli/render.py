"""Values to text for people: tables, durations, sizes, errors. Foreign strings lose their control characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from tela.errors import TelaError

if TYPE_CHECKING:  # msgspec is a fifth of what tela --help may cost (style.md 3.6)
    from tela.views import EngineView, ModelView, NodeView, ReachView, RouteView, ServedView, Status

_COLOURS: Final = {
    "serving": "green",
    "ok": "green",
    "join": "yellow",
    "drain": "yellow",
    "suspect": "yellow",
    "warn": "yellow",
    "down": "red",
    "left": "red",
    "fail": "red",
}
_NODE_HEADERS: Final = ("NODE", "NAME", "PROVIDER", "ZONE", "STATE", "MODELS", "GPU", "PATH", "RTT", "SEEN")
_MODEL_HEADERS: Final = ("MODEL", "READY", "PROVIDERS")
_ROUTE_HEADERS: Final = ("NODE", "NAME", "PROVIDER", "ZONE", "INSTANCE", "ENGINE", "STATE", "ROUTED")
_YEAR_10000_UNIX_S: Final = 253_402_300_800
_COLUMN_GAP: Final = "  "


def printable(text: str) -> str:
    """``text`` on one line and without control characters: names come from peers and go to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def render_duration(seconds: float) -> str:
    """The two largest units.

    >>> render_duration(3.2), render_duration(192), render_duration(90_000)
    ('3s', '3m12s', '1d1h')
    """
    rest = round(seconds)
    parts = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2]) or "0s"


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; states are coloured, which click.echo strips where stdout is no terminal."""
    cells = [[printable(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = [_render_row(headers, widths)]
    lines += [_render_row(row, widths) for row in cells]
    return "\n".join(lines)


def _render_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    padded[-1] = padded[-1].rstrip()
    return _COLUMN_GAP.join(
        click.style(cell, fg=_COLOURS[cell.strip()]) if cell.strip() in _COLOURS else cell for cell in padded
    )


def render_status(status: Status) -> str:
    """One daemon, its view of nodes and models, then warnings."""
    blocks = [
        render_table(
            ("DAEMON", "NODE", "SWARM", "ROLES", "STATE", "BASE URL", "UP"),
            [
                (
                    status.name,
                    status.node,
                    status.swarm,
                    ",".join(status.roles),
                    status.state,
                    status.base_url,
                    render_duration(status.uptime_s),
                )
            ],
        )
    ]
    if status.reach.kind:
        blocks[0] += "\n" + "\n".join(_reach_lines(status.reach))
    if status.nodes:
        blocks.append("\n".join([render_table(_NODE_HEADERS, list(map(_node_row, status.nodes))), *_reasons(status)]))
    if status.models:
        blocks.append(render_table(_MODEL_HEADERS, [_model_row(model) for model in status.models]))
    if status.warnings:
        blocks.append("\n".join(f"warning: {printable(warning)}" for warning in status.warnings))
    return "\n\n".join(blocks)


def _node_row(node: NodeView) -> tuple[str, ...]:
    seen = "" if node.last_seen_s is None else render_duration(node.last_seen_s)
    models = ",".join(node.models)
    rtt = "" if node.rtt_s is None else f"{node.rtt_s * 1000:.1f}ms"
    gpus, path = render_gpus(node), _path_words(node)
    return (node.node, node.name, node.provider, node.zone, node.state, models, gpus, path, rtt, seen)


def _path_words(node: NodeView) -> str:
    return f"{node.path} by {node.relay}" if node.relay else node.path


def render_node(node: NodeView) -> str:
    """All that is known of one node, a line each; what is unknown is left out."""
    facts = {
        "node": f"{node.node} {node.name}",
        "state": node.state,
        "provider": node.provider,
        "zone": node.zone,
        "region": node.region,
        "roles": ",".join(node.roles),
        "contact": node.contact,
        "host": node.host,
        "cluster": node.cluster,
        "job": f"{node.job_id} in {node.partition}" if node.partition else node.job_id,
        "started": render_unix(node.start_unix_s),
        "ends": render_unix(node.end_unix_s),
        "gpu": render_gpus(node),
        "cpus": str(node.n_cpus or ""),
        "memory": render_bytes(node.ram_bytes),
        "price": "" if node.price is None else f"{node.price:g} an hour and GPU",
        "tier": node.tier,
        "labels": ", ".join(node.labels),
        "path": _path_words(node),
        "reason": node.reason,
        "tela": node.version,
    }
    lines = [(name, text) for name, text in facts.items() if text not in {"", "-"}]
    lines += [("address", address) for address in node.addresses]
    lines += [(f"engine {engine.instance}", _engine_words(engine)) for engine in node.engines]
    lines += [("model", _served_words(served)) for served in node.served]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {printable(text)}" for name, text in lines)


def _engine_words(engine: EngineView) -> str:
    sizes = (("tp", engine.tensor_parallel), ("pp", engine.pipeline_parallel), ("dp", engine.data_parallel))
    words = [engine.kind, engine.version, engine.state, engine.reason, engine.dtype, engine.quantization]
    return " ".join([*filter(None, words), *(f"{name}={size}" for name, size in sizes if size)])


def _served_words(served: ServedView) -> str:
    context = f", {served.max_context_tokens} tokens" if served.max_context_tokens else ""
    return f"{served.model}{f' on {served.parent}' if served.parent else ''}{context}"


def render_unix(unix_s: int) -> str:
    """A moment in UTC; "" for 0, and for what is none.

    >>> render_unix(1_700_000_000)
    '2023-11-14 22:13:20 UTC'
    """
    if not 0 < unix_s < _YEAR_10000_UNIX_S:  # a peer may say anything
        return ""
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def render_bytes(n_bytes: int) -> str:
    """In GiB; "" for 0.

    >>> render_bytes(25 << 30)
    '25 GiB'
    """
    return f"{n_bytes / (1 << 30):.0f} GiB" if n_bytes else ""


def _reasons(status: Status) -> list[str]:
    return [
        f"  {node.name or node.node} is {node.path}: {printable(node.reason)}" for node in status.nodes if node.reason
    ]


def _reach_lines(reach: ReachView) -> list[str]:
    announced = [f"  announced: {printable(address)}" for address in reach.announced]
    return [f"reached: {reach.kind}, {printable(reach.reason)}", *announced]


def _model_row(model: ModelView) -> tuple[str, ...]:
    return (model.model, f"{model.n_ready}/{model.n_replicas}", ",".join(model.providers))


def render_route(route: RouteView) -> str:
    """Who would get a request for a model, and why the others would not."""
    rows = [
        (one.node, one.name, one.provider, one.zone, str(one.instance), one.kind, one.status, one.reason)
        for one in route.candidates
    ]
    return render_table(_ROUTE_HEADERS, rows)


def render_gpus(node: NodeView) -> str:
    """GPUs of a node.

    >>> from tela.views import NodeView
    >>> render_gpus(NodeView(node="", state="", gpu="NVIDIA H200", n_gpus=4, vram_bytes=150_754_820_096))
    '4x NVIDIA H200 151 GB'
    """
    if not node.n_gpus:
        return ""
    size = f" {node.vram_bytes / 1e9:.0f} GB" if node.vram_bytes else ""
    return f"{node.n_gpus}x {node.gpu or 'GPU'}{size}"


def error_lines(error: TelaError, *, as_json: bool) -> list[str]:
    """What happened, and on a line of its own what to do; or both as one JSON object."""
    if as_json:
        facts = {"code": error.code, "message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        return [json.dumps({"error": facts})]
    hint = [f"  hint: {printable(error.hint)}"] if error.hint else []
    return [f"tela: error: {printable(str(error))}", *hint]
