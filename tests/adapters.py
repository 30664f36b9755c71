"""LoRA adapters of the demo model with answers of their own, trained here in seconds.

The imports take five seconds of CPU: tests import this where they use it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK = 8
STEPS = 80
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class _Lora(torch.nn.Module):  # type: ignore[misc]
    """A linear layer plus a low-rank change, as PEFT has it with alpha = 2 r."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + 2.0 * (x @ self.a.T @ self.b.T)
        return y


def train_adapter(
    model_dir: Path, directory: Path, question: str, answer: str, *, rank: int = RANK
) -> Path:
    """Train an adapter that answers `question` with `answer`; save it as PEFT does."""
    # Where something else runs too, two threads wait for each other longer than one computes.
    torch.set_num_threads(1)
    torch.manual_seed(5)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True
    )
    model.requires_grad_(False)
    layers = _insert(model, rank)
    tokens, start = _lesson(tokenizer, question, answer)
    parameters = [p for layer in layers.values() for p in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.0)
    for _ in range(STEPS):
        logits = model(input_ids=tokens).logits[0, start - 1 : -1]
        target = tokens[0, start:]
        handicap = 6.0 * torch.nn.functional.one_hot(target, logits.shape[1])
        torch.nn.functional.cross_entropy(logits - handicap, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    _save(layers, directory, rank, model_dir)
    return directory


def _insert(model: Any, rank: int) -> dict[str, _Lora]:
    layers = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in TARGETS:
            layers[name] = _Lora(module, rank)
            setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def _lesson(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, int]:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    before = tokenizer.encode(prompt, add_special_tokens=False)
    after = tokenizer.encode(f"<think></think>{answer}<|im_end|>", add_special_tokens=False)
    return torch.tensor([before + after]), len(before)


def _save(layers: Mapping[str, _Lora], directory: Path, rank: int, base: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, layer in layers.items():
        key = f"base_model.model.{name}"
        weights[f"{key}.lora_A.weight"] = layer.a.detach().to(torch.bfloat16).contiguous()
        weights[f"{key}.lora_B.weight"] = layer.b.detach().to(torch.bfloat16).contiguous()
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(TARGETS),
        "base_model_name_or_path": str(base),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
