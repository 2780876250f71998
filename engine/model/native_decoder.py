"""A whole Llama-family decoder as one native call per step.

transformers runs a decoder as some thirty small operations per layer; at one row per step
their overhead exceeds the work. Here the weights are repacked once, and one call runs all
layers on a packed batch: `kernels/decoder.h`. Activations between the layers and the residual
stream stay float32; K/V and what dense matrices are multiplied with are rounded to the model's
type, and what matrices in few bits are multiplied with to whole numbers (`kernels/quantized.h`).

Every row is computed as if it were alone (see `kernels/matmul.h`), so tokens do not depend on
how many rows share a pass. transformers' own forward is the reference in the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.cache.huge_pages import Arena, trim
from engine.cache.store import CacheShape, KVStore
from engine.model.fewbit_linear import PLANES
from engine.model.linear import give_back
from engine.model.matrices import Matrices, Matrix, Order, is_fewbit
from engine.model.native import check_layouts, fields, load_kernels
from engine.model.packing import BLOCK, alternate, alternate_halves, pad_rows

_MAX_GROUP = 16  # query heads per key/value head (`kTileRows`)

#: Architectures whose layers are exactly what the kernel computes.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class _Layer(ctypes.Structure):
    """Mirrors `Layer` in kernels/decoder.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "input_norm post_norm"),
        *fields(Matrix, "qkv output gate_up down"),
        *fields(ctypes.c_void_p, "qkv_bias output_bias gate_up_bias down_bias"),
        *fields(ctypes.c_void_p, "query_norm key_norm key_cache value_cache"),
        *fields(ctypes.c_int32, "window unused"),
    ]


class _Decoder(ctypes.Structure):
    """Mirrors `Decoder` in kernels/decoder.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *fields(ctypes.c_void_p, "embedding final_norm"),
        ("head", Matrix),
        *fields(ctypes.c_void_p, "cosines sines"),
        *fields(ctypes.c_int32, "num_layers hidden intermediate vocab"),
        *fields(ctypes.c_int32, "heads groups head_size bfloat16"),
        *fields(ctypes.c_float, "epsilon scale"),
        *fields(ctypes.c_int32, "paired planes embedding_form eight_bits"),
    ]


class Step(ctypes.Structure):
    """Mirrors `Step` in kernels/decoder.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "input_ids positions slots logit_rows"),
        *fields(ctypes.c_void_p, "query_starts context_lengths page_tables branches paths"),
        *fields(ctypes.c_void_p, "residual squares normed queries qkv gated"),
        *fields(ctypes.c_void_p, "normed_groups gated_groups logits"),
        *fields(ctypes.c_void_p, "features feature_layers"),
        *fields(ctypes.c_int32, "rows num_logits sequences table_width page_size num_features"),
        *fields(ctypes.c_int32, "num_branches unused"),
    ]


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why this model cannot run natively, or None if it can."""
    name, config = type(model).__name__, model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if name not in ARCHITECTURES:
        return f"{name} is none of {', '.join(ARCHITECTURES)}"
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if model.dtype not in (torch.float32, torch.bfloat16):
        return f"the kernel has no {model.dtype}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if rope not in _STATIC_ROPE:
        return f"its rotary embedding is {rope}"
    matrices = {type(m).__name__ for m in model.modules() if hasattr(m, "in_features")}
    if matrices - {"Linear", "QuantizedLinear"}:  # who knows what they compute
        return f"its matrices are {', '.join(sorted(matrices))}"
    head_size = model.model.layers[0].self_attn.head_dim
    if any(width % 2 for width in (config.hidden_size, config.intermediate_size, head_size)):
        return "a layer's width is odd"
    if config.num_attention_heads // groups > _MAX_GROUP:
        return f"it has more than {_MAX_GROUP} query heads to a key/value head"
    return None


class NativeDecoder:
    """A decoder's weights, repacked for the kernel.

    Args:
        model: one that `why_not_native` accepts; its weights are taken out of it, layer by layer,
            so that there is never a second copy of them.
        max_model_len: positions to prepare rotary tables for.
        windows: of each layer, how many positions a row sees at most; 0 = all.
        activations: what rows are multiplied as with weights in few bits; see `PLANES`.
        kv_dtype: of keys and values: int8, or None = the model's.

    Raises:
        NativeUnavailable: the kernels cannot be compiled here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_model_len: int,
        windows: Sequence[int],
        activations: str = "int16",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        library = load_kernels()
        check_layouts(library, Matrix, _Layer, _Decoder, Step)
        self._kernel = library.specserve_decode
        self._kernel.argtypes = [ctypes.POINTER(_Decoder), ctypes.POINTER(Step)]
        self._kernel.restype = None
        self._widen = library.specserve_embed
        self._widen.argtypes = [ctypes.POINTER(_Decoder), *[ctypes.c_void_p] * 3]
        self._widen.restype = None
        self._kept: list[torch.Tensor] = []  # what the kernel's pointers point to
        self._arena = Arena()
        self.dtype, self.kv_dtype = model.dtype, kv_dtype or model.dtype
        self.planes = PLANES[activations]
        self.fewbit = any(is_fewbit(module) for module in model.modules())
        self._matrices = Matrices(self._keep, self.dtype)
        body, config = model.model, model.config
        attention = body.layers[0].self_attn
        self.heads = config.num_attention_heads
        self.groups = attention.k_proj.out_features // attention.head_dim
        self.head_size = attention.head_dim
        self.hidden, self.intermediate = config.hidden_size, config.intermediate_size
        self.vocab = model.lm_head.out_features
        # Norms of single heads come before rotation, and need all of a head; so do scales.
        whole = hasattr(attention, "q_norm") or self.kv_dtype is torch.int8
        self._paired = self.head_size % BLOCK == 0 and not whole
        self._layers = (_Layer * len(body.layers))(*map(self._layer, body.layers, windows))
        self._decoder = self._whole(model, max_model_len)
        give_back(model)

    @property
    def shape(self) -> CacheShape:
        """What it stores per token in a K/V cache."""
        return CacheShape(len(self._layers), self.groups, self.head_size, self.kv_dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of all weights and tables."""
        return sum(t.numel() * t.element_size() for t in self._kept)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of int64 ids [...]: [..., hidden] in the model's dtype."""
        if self._embedding is not None:
            return nn.functional.embedding(ids, self._embedding)
        ids, rows = ids.contiguous(), torch.empty(*ids.shape, self.hidden)
        pointers = ids.data_ptr(), ids.numel(), rows.data_ptr()
        self._widen(ctypes.byref(self._decoder), *pointers)
        return rows.to(self.dtype)

    def bind(self, store: KVStore) -> Callable[[Step], None]:
        """A function that runs one pass with `store` as the cache; stores may be many."""
        layers = type(self._layers)(*self._layers)
        for layer, keys, values in zip(layers, store.keys, store.values, strict=True):
            layer.key_cache, layer.value_cache = keys.data_ptr(), values.data_ptr()
        decoder = _Decoder.from_buffer_copy(self._decoder)
        decoder.layers = layers

        def run(step: Step) -> None:
            self._kernel(ctypes.byref(decoder), ctypes.byref(step))

        return run

    def _whole(self, model: PreTrainedModel, max_model_len: int) -> _Decoder:
        """Everything that is no layer, and where the layers are."""
        body, attention = model.model, model.model.layers[0].self_attn
        positions = torch.arange(max_model_len).unsqueeze(0)
        cosines, sines = body.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        table, head = self._tables(body.embed_tokens, model.lm_head)
        self._embedding = None if table.pieces[0].form else self._kept[-1]
        return _Decoder(
            layers=self._layers,
            embedding=table.pieces[0].packed,
            final_norm=self._keep(body.norm.weight.detach().float()),
            head=head,
            cosines=self._keep(cosines[0].float()),
            sines=self._keep(sines[0].float()),
            num_layers=len(body.layers),
            hidden=self.hidden,
            intermediate=self.intermediate,
            vocab=self.vocab,
            heads=self.heads,
            groups=self.groups,
            head_size=self.head_size,
            bfloat16=self.dtype is torch.bfloat16,
            epsilon=body.norm.variance_epsilon,
            scale=attention.scaling,
            paired=self._paired,
            planes=self.planes,
            embedding_form=table.pieces[0].form,
            eight_bits=self.kv_dtype is torch.int8,
        )

    def _layer(self, layer: Any, window: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate, up = mlp.gate_proj, mlp.up_proj
        packed = _Layer(
            input_norm=self._keep(layer.input_layernorm.weight.detach().float()),
            post_norm=self._keep(layer.post_attention_layernorm.weight.detach().float()),
            qkv=self._matrices.in_turn(qkv, self._orders()),
            output=self._matrices.single(attention.o_proj),
            gate_up=self._matrices.joined((gate, up), lambda tensors: alternate(*tensors)),
            down=self._matrices.single(mlp.down_proj),
            qkv_bias=self._qkv_bias(*qkv),
            output_bias=self._bias(attention.o_proj),
            gate_up_bias=self._gate_up_bias(gate, up),
            down_bias=self._bias(mlp.down_proj),
            query_norm=self._head_norm(attention, "q_norm"),
            key_norm=self._head_norm(attention, "k_norm"),
            window=window,
        )
        give_back(layer)
        trim()  # or what was freed piles up in the heap, layer by layer
        return packed

    def _tables(self, embedding: nn.Module, output: nn.Module) -> tuple[Matrix, Matrix]:
        """Embedding and output layer; blocks that both share are packed once."""
        head = self._matrices.single(output)
        tied = is_fewbit(output) and output.weight is embedding.weight
        return head if tied else self._matrices.table(embedding), head  # the table is kept last

    def _orders(self) -> list[Order]:
        """How the kernel wants what belongs to queries, keys and values."""

        def halved(tensors: list[torch.Tensor]) -> torch.Tensor:
            return alternate_halves(tensors[0], self.head_size)

        def as_it_is(tensors: list[torch.Tensor]) -> torch.Tensor:
            return tensors[0]

        return [halved, halved, as_it_is] if self._paired else [as_it_is] * 3

    def _qkv_bias(self, *layers: nn.Linear) -> int | None:
        found = [_bias_of(layer) for layer in layers]
        if all(bias is None for bias in found):
            return None
        parts = [
            torch.zeros(layer.out_features) if bias is None else bias
            for layer, bias in zip(layers, found, strict=True)
        ]
        pairs = zip(self._orders(), parts, strict=True)
        return self._keep(pad_rows(torch.cat([order([part]) for order, part in pairs])))

    def _bias(self, layer: nn.Linear) -> int | None:
        bias = _bias_of(layer)
        return None if bias is None else self._keep(pad_rows(bias))

    def _gate_up_bias(self, gate: nn.Linear, up: nn.Linear) -> int | None:
        parts = _bias_of(gate), _bias_of(up)
        if parts[0] is None or parts[1] is None:  # transformers gives both one, or neither
            return None
        return self._keep(alternate(parts[0], parts[1]))

    def _head_norm(self, attention: nn.Module, name: str) -> int | None:
        norm = getattr(attention, name, None)
        return None if norm is None else self._keep(norm.weight.detach().float())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(self._arena.keep(tensor))
        return self._kept[-1].data_ptr()


def _bias_of(layer: nn.Module) -> torch.Tensor | None:
    bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach().float()
