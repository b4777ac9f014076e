"""A tiny random Llama on disk for the engine tier; it must never know of the engine or the pool.

The gains of the random weights are chosen so that the whole context decides the output: of 48 prompts of 200 tokens in
which one block of 32 was replaced, all gave another greedy output within 8 tokens, and nearly every token of an output
differs from the others. Weights of `load_format="dummy"` hardly show a wrong KV block.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512


@dataclass(frozen=True)
class TinyModel:
    """Shape of a model. `sliding` names the layers that see only `window` tokens; the others attend to everything."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    sliding: tuple[int, ...] = ()
    window: int = 64
    max_tokens: int = 1024
    seed: int = 7

    def write(self, directory: Path) -> Path:
        """Write config.json, model.safetensors and tokenizer files into `directory`, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self._config(), indent=1))
        save_file(self._weights(), str(directory / "model.safetensors"))
        vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(directory / "tokenizer.json"))
        special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.max_tokens} | special)
        )
        return directory

    def write_adapter(self, directory: Path, seed: int) -> Path:
        """Write a LoRA adapter of this model into `directory`, large enough to change nearly every token."""
        directory.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        rows = {"q_proj": self.heads * self.head_dim, "v_proj": self.kv_heads * self.head_dim}
        described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
        described |= {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": list(rows)}
        (directory / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": "model"}))
        weights = {}
        for layer in range(self.layers):
            for name, outputs in rows.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{prefix}.lora_A.weight"] = torch.randn(8, self.hidden, generator=generator) / self.hidden**0.5
                weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator)
        save_file(weights, str(directory / "adapter_model.safetensors"))
        return directory

    def _config(self) -> dict[str, object]:
        kinds = ["sliding_attention" if i in self.sliding else "full_attention" for i in range(self.layers)]
        config: dict[str, object] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }
        if self.sliding:
            config |= {"layer_types": kinds, "sliding_window": self.window}
        return config

    def _weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = {
            "model.embed_tokens.weight": draw(VOCABULARY, self.hidden, 0.5 * self.hidden**0.5),
            "model.norm.weight": torch.ones(self.hidden),
            "lm_head.weight": draw(VOCABULARY, self.hidden, 4.0),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            weights |= {
                prefix + "input_layernorm.weight": torch.ones(self.hidden),
                prefix + "post_attention_layernorm.weight": torch.ones(self.hidden),
                prefix + "self_attn.q_proj.weight": draw(queries, self.hidden, 1.5),
                prefix + "self_attn.k_proj.weight": draw(keys, self.hidden, 1.5),
                prefix + "self_attn.v_proj.weight": draw(keys, self.hidden, 2.0),
                prefix + "self_attn.o_proj.weight": draw(self.hidden, queries, 2.0),
                prefix + "mlp.gate_proj.weight": draw(2 * self.hidden, self.hidden, 1.0),
                prefix + "mlp.up_proj.weight": draw(2 * self.hidden, self.hidden, 1.0),
                prefix + "mlp.down_proj.weight": draw(self.hidden, 2 * self.hidden, 4.0),
            }
        return weights
