import json
import subprocess

import pytest

from tela.hardware import Gpu, find_hardware, parse_nvidia_smi, run_command, visible_gpus
from tela.record import MAX_STRING_BYTES

SMI = """0, GPU-1a2b, NVIDIA H200, 143771
1, GPU-3c4d, NVIDIA H200, 143771
2, GPU-5e6f, NVIDIA H200, 143771
"""
GPUS = parse_nvidia_smi(SMI)


def smi(argv):
    return SMI


def no_driver(argv):
    raise FileNotFoundError(argv[0])


def broken_driver(argv):
    raise subprocess.CalledProcessError(9, argv)


def hung_driver(argv):
    raise subprocess.TimeoutExpired(argv, 5)


@pytest.mark.parametrize("run", [no_driver, broken_driver, hung_driver])
def test_find_hardware_without_a_driver_is_unknown(run):
    hardware, warning = find_hardware({}, run)
    assert (hardware.origin, hardware.gpu, hardware.n_gpus, warning) == ("unknown", "", 0, "")
    assert hardware.n_cpus > 0
    assert hardware.ram_bytes > 0


def test_find_hardware_reads_nvidia_smi():
    hardware, _ = find_hardware({}, smi)
    assert (hardware.gpu, hardware.n_gpus, hardware.vram_bytes) == ("NVIDIA H200", 3, 143_771 * 1024 * 1024)
    assert hardware.origin == "nvidia-smi"


def test_find_hardware_declared_wins(tmp_path):
    path = tmp_path / "inventory.json"
    path.write_text('{"gpu": "GH200", "n_gpus": 4, "vram_bytes": 96000000000, "n_cpus": 288}')
    hardware, warning = find_hardware({"TELA_INVENTORY": str(path)}, smi)
    assert (hardware.gpu, hardware.n_gpus, hardware.vram_bytes, hardware.n_cpus) == ("GH200", 4, 96_000_000_000, 288)
    assert (hardware.origin, warning) == ("declared", "")
    assert hardware.ram_bytes > 0


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"gpus": 4}', '{"n_gpus": "many"}', '{"n_gpus": -1}', "\udcff", "x" * 70_000]
)
def test_find_hardware_with_a_bad_inventory_warns_and_looks_itself(tmp_path, content):
    path = tmp_path / "inventory.json"
    path.write_text(content, errors="surrogateescape")
    hardware, warning = find_hardware({"TELA_INVENTORY": str(path)}, smi)
    assert hardware.origin == "nvidia-smi"
    assert str(path) in warning


def test_find_hardware_with_a_missing_inventory_warns(tmp_path):
    hardware, warning = find_hardware({"TELA_INVENTORY": str(tmp_path / "none.json")}, no_driver)
    assert hardware.origin == "unknown"
    assert "none.json" in warning


def test_find_hardware_cuts_a_name_that_a_record_cannot_carry(tmp_path):
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps({"gpu": "é" * 300}))
    hardware, _ = find_hardware({"TELA_INVENTORY": str(path)}, smi)
    assert len(hardware.gpu.encode()) <= MAX_STRING_BYTES


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        ("GPU-3c4d", ["1"]),
        ("GPU-3c,GPU-1a", ["1", "0"]),
        ("MIG-77, MIG-78", ["MIG-77", "MIG-78"]),
        ("0,7,1", ["0"]),
        ("nonsense", []),
    ],
)
def test_visible_gpus_follows_cuda_visible_devices(visible, numbers):
    assert [gpu.number for gpu in visible_gpus(GPUS, visible)] == numbers


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "a, b, c, d", "0, GPU-1, one, two, three"])
def test_parse_nvidia_smi_skips_what_is_no_gpu(text):
    assert parse_nvidia_smi(text) == []


def test_parse_nvidia_smi_with_unified_memory_knows_no_size():
    assert parse_nvidia_smi("0, GPU-1, NVIDIA GB10, [N/A]") == [Gpu("0", "GPU-1", "NVIDIA GB10", 0)]


def test_run_command_gives_what_a_command_prints():
    assert run_command(["echo", "x"]) == "x\n"
    with pytest.raises(subprocess.CalledProcessError):
        run_command(["false"])
