"""tela: GPUs in many places, one OpenAI-compatible service."""

__version__ = "0.1.0"
