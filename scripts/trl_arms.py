"""The rivals of scripts/bench_trl.py: TRL's SFTTrainer, transformers and PEFT, on a CPU.

They compute on one thread, in float32 or under autocast in bfloat16, without jax: bench_trl.py
starts this file with the interpreter of --python. A step is a loss, a backward pass, clipping by
the global norm and fused AdamW in a plain loop, without the logging of a trainer.
"""

import argparse
import json
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from bench_worker import serve
from torch import nn
from torch.nn import functional


def build_model(size: SimpleNamespace) -> Any:
    """Return GPT2LMHeadModel or LlamaForCausalLM of a size of bench_sizes, without dropout."""
    shared = {"vocab_size": size.vocab, "tie_word_embeddings": True, "use_cache": False}
    if size.family == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=size.width,
            n_layer=size.depth,
            n_head=size.heads,
            n_positions=size.length,
            n_inner=size.hidden,
            layer_norm_epsilon=size.norm_eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **shared,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        hidden_size=size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.hidden,
        max_position_embeddings=size.length,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        **shared,
    )
    return transformers.LlamaForCausalLM(config)


def add_lora(model: Any, family: str, rank: int, alpha: float) -> Any:
    """Return PEFT's model with LoRA on all projections of the layers."""
    import peft

    layers = {
        "gpt2": "c_attn,c_proj,c_fc",
        "llama": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=layers[family].split(","),
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def build_trainer(model: Any, ids: list[list[int]], length: int) -> Any:
    """Return TRL's SFTTrainer of full rows, which need no padding and no packing."""
    import datasets
    import tokenizers
    import trl

    words = {"<end>": 0} | {str(i): i for i in range(1, 8)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<end>"
    )
    settings = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=length,
        report_to="none",
        per_device_train_batch_size=len(ids),
    )
    rows = datasets.Dataset.from_dict({"input_ids": ids})
    return trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)


class Rival:
    """A model in training, on the rows of bench_sizes."""

    def __init__(self, arm: str, size: SimpleNamespace, optim: dict[str, Any], precision: str):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        draw = np.random.default_rng(0)
        ids = draw.integers(0, size.vocab, (size.rows, size.length + 1), np.int32).astype(np.int64)
        library, _, kind = arm.partition(" ")
        model = build_model(size)
        self._is_half = precision == "bfloat16"
        if kind == "lora":
            if self._is_half:
                model = model.to(torch.bfloat16)  # the adapter is made in float32
            model = add_lora(model, size.family, size.rank, size.alpha)
        self._ids, self._targets = (torch.from_numpy(x.copy()) for x in (ids[:, :-1], ids[:, 1:]))
        self._trainer = None
        if library == "trl":
            self._trainer = build_trainer(model, ids[:, :-1].tolist(), size.length)
            model = self._trainer.model
        self._model = model.train()
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._clip = optim.pop("clip")
        self._optimizer = torch.optim.AdamW(self._parameters, fused=True, **optim)

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        return sum(each.numel() for each in self._parameters)

    def _loss(self) -> torch.Tensor:
        if self._trainer is None:
            logits = self._model(input_ids=self._ids).logits
            return functional.cross_entropy(logits.flatten(0, 1), self._targets.flatten())
        inputs = {
            "input_ids": self._ids,
            "labels": self._ids,
            "attention_mask": torch.ones_like(self._ids),
        }
        count = self._ids.numel() - len(self._ids)
        return self._trainer.compute_loss(self._model, inputs, num_items_in_batch=count)

    def steps(self, count: int) -> float:
        """Take `count` steps and return the loss of the last, before its update."""
        for _ in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=self._is_half):
                loss = self._loss()
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arm", required=True)
    parser.add_argument("--size", required=True, help="JSON")
    parser.add_argument("--optim", required=True, help="JSON")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    size, optim = SimpleNamespace(**json.loads(args.size)), json.loads(args.optim)
    rival = Rival(args.arm, size, optim, args.precision)
    library = f"torch {torch.__version__}, transformers {transformers.__version__}"
    serve(
        rival.steps,
        {"device": f"{rival.parameters} trained", "library": library, "peak_bytes": None},
    )
