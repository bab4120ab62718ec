"""A model that nobody has to download: the shape of a 1B Llama with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig

from benchmarks.peers.engines import CACHE

RANDOM = "random-1b"


def random_llama(tokenizer: Path) -> Path:
    """The folder of the model, made at the first call (4 GB of memory, 2 GB on disk). Weights are in bfloat16.

    Args:
        tokenizer: folder of a model whose tokenizer it gets, so that workloads can be made for it.
    """
    folder = CACHE / "models" / RANDOM
    if (folder / "config.json").exists():
        return folder
    words: Any = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=-(-len(words) // 64) * 64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=words.bos_token_id or 0,
        eos_token_id=words.eos_token_id or 0,
    )
    import transformers

    torch.manual_seed(0)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model: Any = transformers.LlamaForCausalLM(config)  # in float32: drawing in bfloat16 is slow
    model.to(torch.bfloat16).save_pretrained(part)
    words.save_pretrained(part)
    part.rename(folder)  # whole, or not there
    return folder
