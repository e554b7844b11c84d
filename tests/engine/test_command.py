"""The user's engine command, read by tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.engine.command import detect, parse_command
from tela.errors import UsageError
from tela.record import Instance

PYTHON_VLLM = "python -m vllm.entrypoints.openai.api_server --model org/m"


def launch(text: str, **options: object):
    return parse_command(text.split(), **options).launch(port=4711, helper_port=4712, new_key="drawn")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B", "vllm"),
        ("/opt/venv/bin/vllm serve m", "vllm"),
        ("env A=1 apptainer exec image.sif vllm serve m", "vllm"),
        (PYTHON_VLLM, "vllm"),
        ("python3 -m sglang.launch_server --model-path m", "sglang"),
        ("llama-server -m m.gguf", "llama.cpp"),
        ("python scripts/demo/llama_server.py --model m.gguf", "llama.cpp"),
        ("ollama serve", "ollama"),
        ("text-generation-launcher --model-id m", "tgi"),
        ("./my-server --model meta-llama/vllm", "generic"),
        ("vllm bench", "generic"),
    ],
)
def test_preset_is_read_from_the_command(text: str, kind: str) -> None:
    assert detect(text.split()).kind == kind


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("vllm serve m --port 8000", 8000),
        ("vllm serve m --port=8001", 8001),
        ("vllm serve m --port 1 --port 8002", 8002),
        ("./server --port 8003", 8003),
        ("vllm serve m", None),
        ("./server -p {port}", None),
        ("vllm serve m --port {port}", None),
    ],
)
def test_port_is_read_from_the_command(text: str, port: int | None) -> None:
    assert parse_command(text.split()).port == port


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("vllm serve m", "--port 4711 --host 127.0.0.1"),
        ("vllm serve m --port 8000", "--host 127.0.0.1"),
        ("vllm serve m --port 8000 --host 0.0.0.0", ""),
        ("text-generation-launcher --model-id m", "--port 4711 --hostname 127.0.0.1"),
        ("python -m sglang.launch_server --port 1", "--host 127.0.0.1 --api-key drawn"),
        ("python -m sglang.launch_server --port 1 --host h --api-key k", ""),
        ("./server --port 8000", ""),
        ("ollama serve", ""),
    ],
)
def test_what_the_user_left_out_is_added_at_the_end(text: str, added: str) -> None:
    assert launch(text).argv == (*text.split(), *added.split())


def test_placeholders_are_filled_and_nothing_is_added_beside_them() -> None:
    command = "./server --listen={host}:{port} --name {model} --model org/m"
    assert launch(command).argv == ("./server", "--listen=127.0.0.1:4711", "--name", "org/m", "--model", "org/m")
    argv = launch("vllm serve org/m --port {port} --host {host} --served-model-name {model}").argv
    assert " ".join(argv) == "vllm serve org/m --port 4711 --host 127.0.0.1 --served-model-name org/m"


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("vllm serve m", {}, {"VLLM_PORT": "4712", "VLLM_API_KEY": "drawn"}),
        ("vllm serve m --api-key k", {"VLLM_PORT": "9"}, {}),
        ("vllm serve m", {"VLLM_API_KEY": "k"}, {"VLLM_PORT": "4712"}),
        ("llama-server -m m", {}, {"LLAMA_API_KEY": "drawn"}),
        ("ollama serve", {}, {"OLLAMA_HOST": "127.0.0.1:4711"}),
        ("./server --port 1", {}, {}),
    ],
)
def test_environment_carries_keys_and_helper_ports(text: str, environ: dict, expected: dict) -> None:
    assert launch(text, environ=environ).environ == expected


@pytest.mark.parametrize(
    ("text", "environ", "key"),
    [
        ("vllm serve m", {}, "drawn"),
        ("vllm serve m --api-key mine", {}, "mine"),
        ("vllm serve m", {"VLLM_API_KEY": "mine"}, "mine"),
        ("python -m sglang.launch_server", {}, "drawn"),
        ("ollama serve", {}, ""),
        ("./server --port 1", {}, ""),
    ],
)
def test_gate_gets_the_key_that_the_engine_has(text: str, environ: dict, key: str) -> None:
    endpoint = launch(text, environ=environ).endpoint
    assert endpoint.api_key == key
    assert "drawn" not in repr(endpoint)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("vllm serve m", "127.0.0.1"),
        ("vllm serve m --host 0.0.0.0", "127.0.0.1"),
        ("vllm serve m --host localhost", "127.0.0.1"),
        ("vllm serve m --host ::1", "::1"),
        ("vllm serve m --host 192.0.2.7", "192.0.2.7"),
    ],
)
def test_endpoint_is_loopback_unless_the_engine_binds_elsewhere(text: str, host: str) -> None:
    assert launch(text).endpoint.host == host


@pytest.mark.parametrize("address", ["0.0.0.0:9000", ":9000", "http://127.0.0.1:9000"])
def test_ollama_address_comes_from_the_environment(address: str) -> None:
    command = parse_command(["ollama", "serve"], environ={"OLLAMA_HOST": address})
    assert command.port == 9000
    assert command.launch(port=9000, helper_port=1, new_key="").endpoint.host == "127.0.0.1"


def test_engine_port_that_contradicts_the_command_is_refused_naming_both() -> None:
    with pytest.raises(UsageError, match=r"5000.*8080") as caught:
        parse_command(["./server", "--port", "8080"], engine_port=5000)
    assert caught.value.exit_code == 2
    assert parse_command(["./server", "--port", "8080"], engine_port=8080).port == 8080


def test_engine_port_tells_a_generic_command_apart_from_one_without_port() -> None:
    assert parse_command(["./server"], engine_port=5000).port == 5000
    with pytest.raises(UsageError) as caught:
        parse_command(["./server"])
    assert "{port}" in caught.value.hint


def test_engine_port_is_handed_to_an_engine_whose_flag_is_known() -> None:
    argv = parse_command(["vllm", "serve", "m"], engine_port=5000).launch(port=5000, helper_port=1, new_key="").argv
    assert "--port 5000" in " ".join(argv)


@pytest.mark.parametrize("text", ["", "vllm serve m --port x", "vllm serve m --port 70000", "./s {port} {model}"])
def test_command_that_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_command(text.split())


@given(st.lists(st.text(min_size=1).filter(lambda text: "{" not in text and not text.startswith("--")), max_size=6))
def test_arguments_of_the_user_are_passed_on_untouched(arguments: list[str]) -> None:
    argv = ["vllm", "serve", "m", *arguments]
    command = parse_command(argv)
    assert list(command.launch(port=1, helper_port=2, new_key="k").argv[: len(argv)]) == argv


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "vllm serve m -tp 4 --pipeline-parallel-size=2 -q fp8 --dtype bfloat16",
            Instance(3, "", "bfloat16", "fp8", 4, 2, 0),
        ),
        ("python -m sglang.launch_server --model-path m --tp 8 --dp-size 2", Instance(3, "", "", "", 8, 0, 2)),
        ("text-generation-launcher --model-id m --num-shard 2 --quantize awq", Instance(3, "", "", "awq", 2, 0, 0)),
        ("vllm serve m -tp many", Instance(3)),
        ("serve-it --port {port} --dtype half", Instance(3, "", "half")),
    ],
)
def test_facts_are_what_the_command_says(text: str, facts: Instance) -> None:
    assert parse_command(text.split()).facts(3) == facts
