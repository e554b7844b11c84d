"""What the user's engine command says: which engine, which port, which host, which key. Pure.

Everything after ``--`` is an argv, passed on untouched but for ``{port}``, ``{host}`` and ``{model}``.  A preset knows
the flags of one engine; what the user did not give and the preset knows how to say is added at the end: a port that
tela picked, the loopback address, an API key of this start alone. A key goes through the environment where the engine
reads one there, since an argv shows in ``ps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from tela.engine.report import Endpoint
from tela.errors import UsageError
from tela.record import Instance, clipped

LOOPBACK: Final = "127.0.0.1"
_ANY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::", "localhost"})  # noqa: S104 - read, never bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The flags of one engine; an empty string where it has none."""

    kind: str
    port_flag: str = "--port"
    host_flag: str = "--host"
    address_variable: str = ""  # HOST:PORT in the environment, instead of flags
    helper_ports_variable: str = ""  # first of a run of ports that the engine opens for itself
    model_flags: tuple[str, ...] = ("--model",)
    key_flag: str = ""
    key_variable: str = ""
    version_path: str = ""  # where it tells its version, under version_key
    version_key: str = "version"
    dtype_flags: tuple[str, ...] = ("--dtype",)
    quantization_flags: tuple[str, ...] = ()
    tensor_flags: tuple[str, ...] = ()
    pipeline_flags: tuple[str, ...] = ()
    data_flags: tuple[str, ...] = ()


VLLM: Final = Preset(
    kind="vllm",
    helper_ports_variable="VLLM_PORT",
    key_flag="--api-key",
    key_variable="VLLM_API_KEY",
    version_path="/version",
    quantization_flags=("--quantization", "-q"),
    tensor_flags=("--tensor-parallel-size", "-tp"),
    pipeline_flags=("--pipeline-parallel-size", "-pp"),
    data_flags=("--data-parallel-size", "-dp"),
)
SGLANG: Final = Preset(
    kind="sglang",
    model_flags=("--model-path", "--model"),
    key_flag="--api-key",
    version_path="/server_info",
    quantization_flags=("--quantization",),
    tensor_flags=("--tensor-parallel-size", "--tp-size", "--tp"),
    pipeline_flags=("--pipeline-parallel-size", "--pp-size", "--pp"),
    data_flags=("--data-parallel-size", "--dp-size", "--dp"),
)
LLAMA_CPP: Final = Preset(
    kind="llama.cpp",
    model_flags=("--model", "-m"),
    key_flag="--api-key",
    key_variable="LLAMA_API_KEY",
    version_path="/props",
    version_key="build_info",
)
OLLAMA: Final = Preset(
    kind="ollama", port_flag="", host_flag="", address_variable="OLLAMA_HOST", version_path="/api/version"
)
TGI: Final = Preset(
    kind="tgi",
    host_flag="--hostname",
    model_flags=("--model-id",),
    version_path="/info",
    quantization_flags=("--quantize",),
    tensor_flags=("--num-shard",),
)
GENERIC: Final = Preset(kind="generic")

# Programs and Python modules by their exact names, so that a model called llama does not make an engine.
_PROGRAMS: Final = {
    "llama-server": LLAMA_CPP,
    "llama_server": LLAMA_CPP,
    "llama_server.py": LLAMA_CPP,
    "text-generation-launcher": TGI,
}
_SERVE_PROGRAMS: Final = {"vllm": VLLM, "sglang": SGLANG, "ollama": OLLAMA}
_MODULES: Final = {"vllm": VLLM, "sglang": SGLANG, "llama_cpp": LLAMA_CPP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of an engine: the final argv, what it adds to the environment, where the engine will answer."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    endpoint: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """A command that was read and found consistent. ``port`` is None where each start picks one."""

    preset: Preset
    argv: tuple[str, ...]
    port: int | None
    host: str | None  # as the user gave it
    api_key: str  # the user's; "" where each start may draw one
    environ: Mapping[str, str]

    def facts(self, number: int) -> Instance:
        """What the command says of the engine that it starts, for readers of the registry."""
        preset = self.preset
        return Instance(
            number,
            dtype=self._said(preset.dtype_flags),
            quantization=self._said(preset.quantization_flags),
            tensor_parallel=self._counted(preset.tensor_flags),
            pipeline_parallel=self._counted(preset.pipeline_flags),
            data_parallel=self._counted(preset.data_flags),
        )

    def _said(self, flags: Sequence[str]) -> str:
        return clipped(next((value for flag in flags if (value := _value(self.argv, flag)) is not None), ""))

    def _counted(self, flags: Sequence[str]) -> int:
        said = self._said(flags)
        return int(said) if said.isascii() and said.isdecimal() and len(said) < 6 else 0

    def launch(self, *, port: int, helper_port: int, new_key: str) -> Launch:
        """The command of one start.

        Args:
            port: where the engine shall answer; the user's own where there is one.
            helper_port: first of the ports that the engine may use for itself.
            new_key: API key for an engine that takes one and has none of the user's.
        """
        host = self.host or LOOPBACK
        key_arguments, key_environ = self._offer_key(new_key)
        reached = LOOPBACK if host in _ANY_ADDRESS else host
        return Launch(
            argv=(*self._filled(port, host), *self._missing(port, host), *key_arguments),
            environ={**self._addresses(port, host, helper_port), **key_environ},
            endpoint=Endpoint(reached, port, self.api_key or (new_key if key_arguments or key_environ else "")),
        )

    def _filled(self, port: int, host: str) -> tuple[str, ...]:
        """The user's argv with its placeholders replaced."""
        values = {"{port}": str(port), "{host}": host, "{model}": _model(self.argv, self.preset) or ""}
        filled = list(self.argv)
        for placeholder, value in values.items():
            filled = [argument.replace(placeholder, value) for argument in filled]
        return tuple(filled)

    def _missing(self, port: int, host: str) -> tuple[str, ...]:
        """Port and host flags that the user left to us."""
        preset = self.preset
        if preset is GENERIC:  # who knows whether it has such flags
            return ()
        needs_port = preset.port_flag and not _mentions(self.argv, preset.port_flag, "{port}")
        needs_host = preset.host_flag and not _mentions(self.argv, preset.host_flag, "{host}")
        port_arguments = (preset.port_flag, str(port)) if needs_port else ()
        return (*port_arguments, preset.host_flag, host) if needs_host else port_arguments

    def _addresses(self, port: int, host: str, helper_port: int) -> dict[str, str]:
        """What the engine reads of addresses in its environment."""
        preset, environ = self.preset, dict[str, str]()
        if preset.address_variable:
            environ[preset.address_variable] = f"{host}:{port}"
        if preset.helper_ports_variable and preset.helper_ports_variable not in self.environ:
            environ[preset.helper_ports_variable] = str(helper_port)
        return environ

    def _offer_key(self, new_key: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """How to tell the engine a key that it has not been told: arguments and environment."""
        if self.api_key or not self.preset.key_flag:
            return (), {}
        if self.preset.key_variable:
            return (), {self.preset.key_variable: new_key}
        return (self.preset.key_flag, new_key), {}


def parse_command(
    argv: Sequence[str], *, engine_port: int | None = None, environ: Mapping[str, str] | None = None
) -> EngineCommand:
    """Read an engine command.

    Args:
        argv: everything after ``--``.
        engine_port: what ``--engine-port`` says, if it was given.
        environ: the environment that the engine inherits.

    Raises:
        UsageError: nothing to run, two ports that contradict each other, no way to tell the engine its port, or
            ``{model}`` without a model.

    >>> parse_command(["vllm", "serve", "org/m", "--port=8000"]).port
    8000
    """
    environ = environ or {}
    if not argv:
        raise UsageError("no engine command after --", hint="tela join INVITE -- vllm serve MODEL")
    preset = detect(argv)
    port, host = _port(argv, preset, environ), _host(argv, preset, environ)
    if port is not None and engine_port is not None and port != engine_port:
        raise UsageError(
            f"--engine-port {engine_port} contradicts port {port} of the engine's command",
            hint="leave --engine-port out: the port is read from the command",
        )
    _check_placeholders(argv, preset, has_port=port is not None or engine_port is not None)
    return EngineCommand(
        preset=preset,
        argv=tuple(argv),
        port=engine_port if port is None else port,
        host=host,
        api_key=_value(argv, preset.key_flag) or environ.get(preset.key_variable, ""),
        environ=environ,
    )


def detect(argv: Sequence[str]) -> Preset:
    """The preset of a command, also behind wrappers such as ``env``, ``apptainer exec`` or ``numactl``."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        program = PurePath(argument).name
        if program in _PROGRAMS:
            return _PROGRAMS[program]
        if program in _SERVE_PROGRAMS and following == "serve":
            return _SERVE_PROGRAMS[program]
        module = following.split(".")[0]
        if argument == "-m" and module in _MODULES and "/" not in following:
            return _MODULES[module]
    return GENERIC


def _check_placeholders(argv: Sequence[str], preset: Preset, *, has_port: bool) -> None:
    if preset is GENERIC and not has_port and not any("{port}" in argument for argument in argv):
        raise UsageError(
            f"which port does {PurePath(argv[0]).name} listen on?",
            hint="write {port} where its command takes the port, or give --engine-port",
        )
    if any("{model}" in argument for argument in argv) and not _model(argv, preset):
        raise UsageError("{model} in the engine's command, but no model", hint="write the model's name instead")


def _mentions(argv: Sequence[str], flag: str, placeholder: str) -> bool:
    return _value(argv, flag) is not None or any(placeholder in argument for argument in argv)


def _address(preset: Preset, environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Host and port in the environment of an engine that has no flags for them: ``HOST``, ``HOST:PORT``, ``:PORT``."""
    address = environ.get(preset.address_variable, "").removeprefix("http://")
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
    return host or None, port or None


def _port(argv: Sequence[str], preset: Preset, environ: Mapping[str, str]) -> int | None:
    text = _value(argv, preset.port_flag)
    if text is None and preset.address_variable:
        text = _address(preset, environ)[1]
    if text is None or text == "{port}":
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65_536):
        raise UsageError(f"{preset.port_flag or preset.address_variable} {text!r} of the engine is no port")
    return int(text)


def _host(argv: Sequence[str], preset: Preset, environ: Mapping[str, str]) -> str | None:
    if preset.address_variable:
        return _address(preset, environ)[0]
    host = _value(argv, preset.host_flag)
    return None if host == "{host}" else host


def _model(argv: Sequence[str], preset: Preset) -> str | None:
    for flag in preset.model_flags:
        value = _value(argv, flag)
        if value is not None and value != "{model}":
            return value
    if "serve" in argv[:-1]:  # vllm serve MODEL
        positional = argv[list(argv).index("serve") + 1]
        return None if positional.startswith("-") else positional
    return None


def _value(argv: Sequence[str], flag: str) -> str | None:
    """The value of ``--flag V`` or ``--flag=V``; the last one wins, as in argparse and clap."""
    found = None
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        if flag and argument == flag:
            found = following
        elif flag and argument.startswith(f"{flag}="):
            found = argument.removeprefix(f"{flag}=")
    return found
