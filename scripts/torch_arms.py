"""PyTorch's side of scripts/bench_torch.py: minimal GPT-2 and Llama, and Hugging Face's.

A step is the usual one: scaled_dot_product_attention, autocast for bfloat16 over float32 weights,
fused AdamW, clipping by the global norm. The minimal ones compute joint projections in one product:
query, key and value, gate and up.
"""

import math
from typing import Any, Literal

import torch
from bench_sizes import BETAS, CLIP, DECAY, EPS, LR, Size, batch
from torch import Tensor, nn
from torch.nn import functional

Kernel = Literal["flash", "cudnn", "any"]


class Attention(nn.Module):
    """Causal attention; `kv_heads` keys and values serve all heads.

    Heads rotate if a cosine and a sine are given.
    """

    def __init__(self, size: Size, *, bias: bool):
        super().__init__()
        self.head = size.width // size.heads
        self.parts = [count * self.head for count in (size.heads, size.kv_heads, size.kv_heads)]
        self.is_grouped = size.kv_heads < size.heads
        self.qkv = nn.Linear(size.width, sum(self.parts), bias=bias)
        self.out = nn.Linear(size.width, size.width, bias=bias)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, -1, self.head).transpose(1, 2)
            for part in self.qkv(x).split(self.parts, dim=2)
        )
        if turn:
            q, k = (rotated(part, *turn).type_as(v) for part in (q, k))
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.is_grouped
        )
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[..., T, H], the halves of a head turned against each other."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


class GPT2Layer(nn.Module):
    """Layer norms before both parts."""

    def __init__(self, size: Size):
        super().__init__()
        self.norm = nn.LayerNorm(size.width, eps=size.norm_eps)
        self.attention = Attention(size, bias=True)
        self.mlp_norm = nn.LayerNorm(size.width, eps=size.norm_eps)
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Ids to logits, with a table of positions and a tied unembedding."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(GPT2Layer(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, eps=size.norm_eps)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class LlamaLayer(nn.Module):
    """RMS norms before both parts, and a gated MLP."""

    def __init__(self, size: Size):
        super().__init__()
        self.norm = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.attention = Attention(size, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width, eps=size.norm_eps)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm(x), turn)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Ids to logits, with rotary positions and a tied unembedding."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width, eps=size.norm_eps)
        nn.init.normal_(self.embedding.weight, std=0.02)
        head = size.width // size.heads
        exponents = torch.arange(0, head, 2) / head
        angles = torch.outer(torch.arange(size.length), size.rope_theta**-exponents)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        return functional.linear(self.norm(x), self.embedding.weight)


class HuggingFace(nn.Module):
    """GPT2LMHeadModel or LlamaForCausalLM, ids to logits, without dropout."""

    def __init__(self, size: Size):
        super().__init__()
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # `sdpa` by another name. Under torch.compile transformers builds a mask for `sdpa` where
        # torch is older than 2.14, and no kernel of flash attention takes one; for a name that it
        # does not know it builds none.
        transformers.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
        shared: Any = {
            "vocab_size": size.vocab,
            "tie_word_embeddings": True,
            "use_cache": False,
            "attn_implementation": "sdpa_without_mask",
        }
        self.model: Any
        if size.family == "gpt2":
            of_gpt2 = transformers.GPT2Config(
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
            self.model = transformers.GPT2LMHeadModel(of_gpt2)
        else:
            of_llama = transformers.LlamaConfig(
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
            self.model = transformers.LlamaForCausalLM(of_llama)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


class Loss(nn.Module):
    """The mean negative log-likelihood of a model, in float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def minimal(size: Size) -> nn.Module:
    """The minimal model of a size's family."""
    return GPT2(size) if size.family == "gpt2" else Llama(size)


def _only(kernel: Kernel) -> None:
    """On a GPU attention is one of the fused kernels that take no mask, or fails."""
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")
    torch.backends.cuda.enable_cudnn_sdp(kernel != "flash")


class Arm:
    """A model in training, on rows that lie on the device."""

    def __init__(
        self,
        size: Size,
        precision: str,
        *,
        device: Literal["cpu", "cuda"],
        is_minimal: bool,
        is_compiled: bool,
        kernel: Kernel,
        mode: str | None = None,
    ):
        torch.manual_seed(0)
        self.device, self._is_low = device, precision == "bfloat16"
        if device == "cuda":
            _only(kernel)
            torch.set_float32_matmul_precision("high")
        with torch.device(device):
            self._loss = Loss(minimal(size) if is_minimal else HuggingFace(size)).train()
        self._parameters = list(self._loss.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )
        self._called: Any = torch.compile(self._loss, mode=mode) if is_compiled else self._loss
        self._batch = [torch.from_numpy(part).long().to(device) for part in batch(size)]

    def steps(self, count: int) -> float:
        """Take `count` steps; return the loss of the last, before its update."""
        last_loss = math.nan
        for number in range(count):
            with torch.autocast(self.device, torch.bfloat16, enabled=self._is_low):
                loss = self._called(*self._batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if number == count - 1:
                last_loss = loss.item()  # waits for all that the device was given
        return last_loss

    def facts(self) -> dict[str, Any]:
        """The device, and the peak memory of its allocator; None for a CPU, which has no count."""
        is_gpu = self.device == "cuda"
        return {
            "device": torch.cuda.get_device_name() if is_gpu else "cpu",
            "library": f"torch {torch.__version__}",
            "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        }
