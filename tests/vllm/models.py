"""Tiny checkpoints with real random weights: large enough that wrong KV changes the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama() -> Any:
    return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=False)


def _gemma2() -> Any:
    return transformers.Gemma2Config(**_COMMON, sliding_window=64, query_pre_attn_scalar=64)


def _nemotron_h() -> Any:
    return transformers.NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        hybrid_override_pattern="M*M-",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_head_dim=64,
        mamba_num_heads=4,
        mamba_head_dim=64,
        ssm_state_size=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
        max_position_embeddings=2048,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _deepseek_v2() -> Any:
    latent = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 4}
    return transformers.DeepseekV2Config(**{**_COMMON, "num_key_value_heads": 4}, **latent, **experts)


CONFIGS = {"llama": _llama, "gemma2": _gemma2, "nemotron_h": _nemotron_h, "deepseek_v2": _deepseek_v2}


def make(name: str, folder: Path) -> Path:
    """Writes the checkpoint, once; returns its folder."""
    path = folder / name
    if not (path / "config.json").exists():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        if model.config.tie_word_embeddings:
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(0.05)
        model.save_pretrained(path)
    return path
