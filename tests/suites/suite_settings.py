"""Which suites there are."""

from __future__ import annotations

from typing import Any

# The types, each with what the mixins cannot see in its configuration.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma3_text": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "falcon": {},
    "opt": {},
    "deepseek_v3": {},
    "mixtral": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "mamba2": {"has_attentions": False},
    "bert": {},
    "modernbert": {},
    "bart": {"is_encoder_decoder": True},
    "t5": {"is_encoder_decoder": True},
    "whisper": {"is_encoder_decoder": True, "test_resize_embeddings": False},
    "vit": {"test_resize_embeddings": False},
    "llava": {"_is_composite": True},
    "qwen2_vl": {"_is_composite": True},
}

# Files whose test cases are complete; they are run as if they were a model type.
COMPLETE = ("test_monkey_patching",)
