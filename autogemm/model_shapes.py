"""The matrix products of a decoder-only transformer, from the ``config.json`` that Hugging Face models ship with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import InputError
from .shapes import Shape, merged

# Decoders whose MLP is gated (down(act(gate(x)) * up(x))) and whose layers differ only in the fields read below.
GATED_FAMILIES: Final = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gemma", "gemma2",
    "gemma3_text", "phi3", "granite", "cohere", "olmo2", "olmoe", "glm4", "glm4_moe", "internlm2", "smollm3", "gpt_oss",
)  # fmt: skip
PLAIN_FAMILIES: Final = ("gpt2", "gpt_neox", "opt", "phi", "starcoder2")
# Inference engines pad the vocabulary so that every rank gets the same number of rows.
VOCABULARY_MULTIPLE: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """One projection: weight ``[n, k]`` on each rank, run ``count`` times per forward pass.

    Attributes:
        routed: (experts per token, experts) where each of ``experts`` weights sees its share of the tokens only.
    """

    name: str
    n: int
    k: int
    count: int
    routed: tuple[int, int] | None = None

    def at(self, tokens: int) -> Shape:
        """Return the product for ``tokens`` rows of activations."""
        if self.routed is None:
            return Shape(m=tokens, n=self.n, k=self.k, count=self.count, source=self.name)
        chosen, experts = self.routed
        busy = min(experts, tokens * chosen)  # evenly spread: no expert gets a second token before each has one
        rows = -(-tokens * chosen // experts)
        return Shape(m=rows, n=self.n, k=self.k, count=self.count * busy, source=self.name)


class _Fields:
    """Typed reading of a config with errors that name the field."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.document, self.where = document, where

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the first of ``names`` that is set, a positive integer, or ``default``."""
        for name in names:
            value = self.document.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{self.where}: {name} must be a positive integer, got {value!r}")
            return value
        if default is None:
            raise InputError(f"{self.where} lacks {' or '.join(names)}; is it the config.json of a transformer?")
        return default

    def optional(self, *names: str) -> int:
        """Return the first of ``names`` that is set and not 0, or 0."""
        present = [name for name in names if self.document.get(name) not in (None, 0)]
        return self.count(*present[:1]) if present else 0


def model_shapes(path: Path, *, tokens: Sequence[int], tp: int = 1, fused: bool = True) -> list[Shape]:
    """Return the products ``D[M,N] = A[M,K] . W[N,K]^T`` of one forward pass on one tensor-parallel rank.

    Mixture-of-experts layers assume evenly spread tokens. Latent attention (DeepSeek) is listed as it runs over a prompt.

    Args:
        path: a ``config.json``.
        tokens: rows of activations (batch times new tokens), one set of products each.
        tp: tensor-parallel ranks; attention heads, MLP columns and the vocabulary are split over them.
        fused: q, k, v as one product and gate, up as one, as inference engines run them; else one each.

    Raises:
        InputError: unreadable, malformed or unknown config, or one that ``tp`` ranks can't split.
    """
    if tp < 1:
        raise InputError(f"tensor-parallel ranks must be at least 1, got {tp}")
    if not tokens or min(tokens) < 1:
        raise InputError(f"token counts must be positive integers, got {', '.join(map(str, tokens)) or 'none'}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"can't read model config {path}: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"model config {path} is not a JSON object")
    linears = _linears(document, str(path), tp, fused)
    return merged(linear.at(rows) for rows in tokens for linear in linears)


def _linears(document: Mapping[str, Any], where: str, tp: int, fused: bool) -> list[_Linear]:
    text = document.get("text_config")  # multimodal models keep the language model's fields there
    if isinstance(text, dict) and text.get("model_type"):
        document = text
    family = document.get("model_type")
    if family not in GATED_FAMILIES + PLAIN_FAMILIES:
        known = ", ".join(sorted(GATED_FAMILIES + PLAIN_FAMILIES))
        raise InputError(f"{where}: model_type {family!r} is not known; known: {known}")
    f = _Fields(document, where)
    hidden = f.count("hidden_size", "n_embd")
    layers = f.count("num_hidden_layers", "n_layer")
    attention = _latent_attention if f.optional("kv_lora_rank") else _attention
    found = attention(f, hidden, layers, tp, fused)
    found += _mlps(f, hidden, layers, tp, fused, gated=family in GATED_FAMILIES)
    vocabulary = f.count("vocab_size")
    step = tp if vocabulary % tp == 0 else tp * VOCABULARY_MULTIPLE
    found.append(_Linear(name="lm_head", n=-(-vocabulary // step) * step // tp, k=hidden, count=1))
    return found


def _split(what: str, size: int, tp: int, where: str) -> int:
    if size % tp:
        raise InputError(f"{where}: {what}={size} can't be split over {tp} tensor-parallel ranks; use a divisor of {size}")
    return size // tp


def _attention(f: _Fields, hidden: int, layers: int, tp: int, fused: bool) -> list[_Linear]:
    heads = f.count("num_attention_heads", "n_head")
    kv_heads = f.count("num_key_value_heads", default=heads)
    if "head_dim" not in f.document and hidden % heads:
        raise InputError(f"{f.where}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    width = f.count("head_dim", default=hidden // heads)
    own_heads = _split("num_attention_heads", heads, tp, f.where)
    # With more ranks than key-value heads, each rank holds a copy of one.
    own_kv = 1 if tp > kv_heads and tp % kv_heads == 0 else _split("num_key_value_heads", kv_heads, tp, f.where)
    if fused:
        found = [_Linear(name="qkv_proj", n=(own_heads + 2 * own_kv) * width, k=hidden, count=layers)]
    else:
        found = [
            _Linear(name="q_proj", n=own_heads * width, k=hidden, count=layers),
            _Linear(name="k_proj", n=own_kv * width, k=hidden, count=layers),
            _Linear(name="v_proj", n=own_kv * width, k=hidden, count=layers),
        ]
    return [*found, _Linear(name="o_proj", n=hidden, k=own_heads * width, count=layers)]


def _latent_attention(f: _Fields, hidden: int, layers: int, tp: int, fused: bool) -> list[_Linear]:
    # DeepSeek-V2, arXiv:2405.04434, section 2.1: queries and keys/values pass through low-rank latents, which every rank
    # computes whole; the products out of the latents are split by heads.
    heads = _split("num_attention_heads", f.count("num_attention_heads"), tp, f.where)
    kv_rank, q_rank = f.count("kv_lora_rank"), f.optional("q_lora_rank")
    nope, rope, value = f.count("qk_nope_head_dim"), f.count("qk_rope_head_dim"), f.count("v_head_dim")
    queries = heads * (nope + rope)
    found = []
    if not q_rank:
        found = [
            _Linear(name="q_proj", n=queries, k=hidden, count=layers),
            _Linear(name="kv_a_proj", n=kv_rank + rope, k=hidden, count=layers),
        ]
    else:
        if fused:
            found = [_Linear(name="q_a_kv_a_proj", n=q_rank + kv_rank + rope, k=hidden, count=layers)]
        else:
            found = [
                _Linear(name="q_a_proj", n=q_rank, k=hidden, count=layers),
                _Linear(name="kv_a_proj", n=kv_rank + rope, k=hidden, count=layers),
            ]
        found.append(_Linear(name="q_b_proj", n=queries, k=q_rank, count=layers))
    found.append(_Linear(name="kv_b_proj", n=heads * (nope + value), k=kv_rank, count=layers))
    found.append(_Linear(name="o_proj", n=hidden, k=heads * value, count=layers))
    return found


def _mlps(f: _Fields, hidden: int, layers: int, tp: int, fused: bool, *, gated: bool) -> list[_Linear]:
    experts = f.optional("num_local_experts", "n_routed_experts", "num_experts")
    moe_layers = _moe_layers(f, layers) if experts else 0
    found: list[_Linear] = []
    if moe_layers < layers:
        fallback = 4 * hidden if f.document.get("model_type") == "gpt2" else None  # n_inner is null in GPT-2 configs
        width = _split("intermediate_size", f.count("intermediate_size", "n_inner", "ffn_dim", default=fallback), tp, f.where)
        found += _mlp("", width, hidden, layers - moe_layers, fused, gated)
    if moe_layers:
        chosen = f.count("num_experts_per_tok", "experts_per_token")
        if chosen > experts:
            raise InputError(f"{f.where}: num_experts_per_tok={chosen} exceeds the {experts} experts")
        width = _split("moe_intermediate_size", f.count("moe_intermediate_size", "intermediate_size"), tp, f.where)
        found.append(_Linear(name="router", n=experts, k=hidden, count=moe_layers))
        found += _mlp("experts.", width, hidden, moe_layers, fused, gated, (chosen, experts))
        shared = f.optional("shared_expert_intermediate_size")
        shared = shared or f.optional("n_shared_experts") * f.optional("moe_intermediate_size")
        if shared:
            own = _split("shared expert width", shared, tp, f.where)
            found += _mlp("shared_experts.", own, hidden, moe_layers, fused, gated)
    return found


def _moe_layers(f: _Fields, layers: int) -> int:
    dense_first, period = f.optional("first_k_dense_replace"), f.optional("moe_layer_freq") or 1
    sparse_step = f.optional("decoder_sparse_step") or 1
    dense = f.document.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)):
        raise InputError(f"{f.where}: mlp_only_layers must be a list of layer numbers, got {dense!r}")
    return sum(i >= dense_first and i % period == 0 and (i + 1) % sparse_step == 0 and i not in dense for i in range(layers))


def _mlp(
    prefix: str, width: int, hidden: int, count: int, fused: bool, gated: bool, routed: tuple[int, int] | None = None
) -> list[_Linear]:
    if not gated:
        first = [_Linear(name=f"{prefix}up_proj", n=width, k=hidden, count=count, routed=routed)]
    elif fused:
        first = [_Linear(name=f"{prefix}gate_up_proj", n=2 * width, k=hidden, count=count, routed=routed)]
    else:
        first = [_Linear(name=f"{prefix}{part}_proj", n=width, k=hidden, count=count, routed=routed) for part in ("gate", "up")]
    return [*first, _Linear(name=f"{prefix}down_proj", n=hidden, k=width, count=count, routed=routed)]
