"""Writes a random Qwen3 checkpoint of 2 million parameters, small enough for vLLM on one core, to the folder given.

Run it with the Python of scripts/lab/vllm_venv.py, which has torch and transformers. Its answers are noise: tests look
at shapes, counts and usage, never at words. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 0
CONTEXT_TOKENS = 2048
VOCABULARY_TOKENS = 4096
TEXT_FILES = 60
"""Of the standard library: text that every machine has, and enough of it to fill the vocabulary."""
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that any text has tokens, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted(Path(os.__file__).parent.glob("*.py"))[:TEXT_FILES]
    tokenizer.train([str(text) for text in texts], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(unfinished)
    make_model(tokenizer).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
