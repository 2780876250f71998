"""From a directory of weights to a model that runs: device, dtype, weights, attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.cache.store import CacheShape
from engine.config import ModelConfig
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.attention.base import AttentionBackend
from engine.model.attention.cpu import DTYPES as CPU_DTYPES
from engine.model.attention.cpu import MAX_GROUP, CpuAttention
from engine.model.attention.reference import ReferenceAttention
from engine.model.choices import (
    DTYPES,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    choose_weights,
)
from engine.model.cuda.weights import CudaDecoder, why_not_cuda
from engine.model.invariant import make_invariant
from engine.model.inventory import describe_weights
from engine.model.linear import can_pack
from engine.model.native import NativeUnavailable
from engine.model.native_decoder import NativeDecoder, why_not_native
from engine.model.native_runner import NativeRunner
from engine.model.passes import Runner
from engine.model.probe import LayerNeeds, cache_shape, longest_sequence, probe
from engine.model.runner import ATTENTION, ModelRunner
from engine.model.weights import read_model, will_have_blocks
from engine.types import WeightsInfo

logger = logging.getLogger(__name__)

RUNNERS = ("auto", "native", "cuda", "torch", "reference")


def _nothing(_page_size: int, _max_rows: int, /) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be given pages.

    Attributes:
        make_runner: (num_pages, page_size) -> runner; allocates the K/V store.
        runner_name: "native", "cuda", "torch" or "reference".
        shape: what the model stores per token.
        device: where it runs.
        vocab_size: token ids in use; the output layer may be padded beyond.
        max_model_len: most tokens it was made for, or configured to.
        eos_token_ids: tokens that end a text.
        checked: what comparing it with transformers' own forward has found, in words.
        reserve: (page_size, most rows of a pass) -> bytes that a runner takes on its device
            beside weights and pages, as far as that is not little.
        embed: int64 ids [...] -> embeddings [..., hidden], for heads, which borrow them.
        taps: of a head: number of its target's layers -> those whose hidden states it reads.
        weights: what it was loaded with.
        dtype: of what is computed between the layers; None = of what is stored.
    """

    make_runner: Callable[[int, int], Runner]
    runner_name: str
    shape: CacheShape
    device: torch.device
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    checked: str = "not compared with transformers"
    reserve: Callable[[int, int], int] = _nothing
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None
    taps: Callable[[int], tuple[int, ...]] | None = None
    weights: WeightsInfo = field(default_factory=WeightsInfo)
    dtype: torch.dtype | None = None

    @property
    def dtype_name(self) -> str:
        """Of what is computed between the layers."""
        return str(self.dtype or self.shape.dtype).removeprefix("torch.")


def load_model(directory: Path, config: ModelConfig) -> LoadedModel:
    """Loads a causal language model from a local directory; no pickles, no remote code.

    Raises:
        ModelNotSupported: the model cannot be run here, and why.
        ConfigurationError: dtype, device or attention cannot be had.
    """
    return adopt_model(open_model(directory, config), config)


def open_model(directory: Path, config: ModelConfig) -> PreTrainedModel:
    """transformers' own model of a directory, on its device and ready for `adopt_model`.

    Raises:
        ModelNotSupported: there is none that could be run here.
        ConfigurationError: dtype, device or attention cannot be had.
    """
    device = choose_device(config.device)
    keep = choose_weights(config.weights, device, config.runner)
    wanted = config.weights if config.weights in DTYPES else config.dtype
    if wanted == "auto" and will_have_blocks(directory, keep):
        # Weights are what is worth fewer bits. Keys and values in bfloat16 would cost more
        # faithfulness than the blocks do, and half of little.
        wanted = "float32"
    model = read_model(directory, choose_dtype(wanted, device), keep).to(device)
    model.eval().requires_grad_(False)
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelNotSupported(
            f"{type(model).__name__} does not route its attention through transformers' "
            "attention interface, so it cannot use a paged KV cache."
        )
    model.set_attn_implementation(ATTENTION)
    return model


def adopt_model(model: PreTrainedModel, config: ModelConfig) -> LoadedModel:
    """Prepares a model that is already in memory, with `ATTENTION` chosen."""
    if config.runner not in RUNNERS:
        raise ConfigurationError(
            f"runner is {config.runner!r}; choose one of {', '.join(RUNNERS)}."
        )
    model.eval().requires_grad_(False)
    needs = probe(model)
    limit = longest_sequence(model, config.max_model_len)
    text = model.config.get_text_config()
    facts = (model.device, text.vocab_size, limit, _eos_token_ids(model))
    make_loaded = partial(LoadedModel, weights=describe_weights(model), dtype=model.dtype)
    if config.runner in ("auto", "native"):
        decoder = _native_decoder(model, limit, needs, config)
        if decoder is not None:
            native = partial(NativeRunner, decoder)
            return make_loaded(native, "native", decoder.shape, *facts, embed=decoder.embed)
    if config.runner in ("auto", "cuda"):
        found = _cuda_runner(model, config, limit, needs)
        if found is not None:
            on_gpu, make_runner, reserve = found
            embed = on_gpu.embed
            return make_loaded(
                make_runner, "cuda", on_gpu.shape, *facts, reserve=reserve, embed=embed
            )
    backend = _choose_attention(config.runner, model, needs[0], limit)
    _make_invariant(model, config.activations)
    name = "reference" if isinstance(backend, ReferenceAttention) else "torch"
    kept = choose_kv_dtype(config.kv_dtype, model.dtype, model.device)
    shape = replace(cache_shape(model, needs), dtype=kept)
    make = partial(ModelRunner, model, backend, shape)
    return make_loaded(make, name, shape, *facts, embed=model.get_input_embeddings())


def _native_decoder(
    model: PreTrainedModel, max_model_len: int, needs: Sequence[LayerNeeds], config: ModelConfig
) -> NativeDecoder | None:
    """The model's weights repacked for the native decoder, or None if it cannot run there."""
    reason = why_not_native(model)
    if reason is None:
        try:
            windows = [layer.window for layer in needs]
            kept = choose_kv_dtype(config.kv_dtype, model.dtype, model.device)
            return NativeDecoder(model, max_model_len, windows, config.activations, kept)
        except NativeUnavailable as error:
            reason = str(error)
    if config.runner == "native":
        raise ConfigurationError(f"runner is native, but {reason}; use auto.")
    logger.info("the native runner does not apply: %s", reason)
    return None


def _cuda_runner(
    model: PreTrainedModel, config: ModelConfig, max_model_len: int, needs: Sequence[LayerNeeds]
) -> tuple[CudaDecoder, Callable[[int, int], Runner], Callable[[int, int], int]] | None:
    """The weights for a GPU's own kernels, what makes a runner of them, and what it takes; None
    if the model cannot run there. On a CPU the kernels are interpreted, for those who ask by
    name."""
    required = config.runner == "cuda"
    if not required and model.device.type != "cuda":
        return None
    reason = why_not_cuda(model)
    if reason is None and config.kv_dtype == "int8":
        reason = "its kernels have no keys and values in int8"
    if reason is None:
        try:  # only here: Triton is no part of a server on CPUs
            from engine.model.cuda.runner import CudaRunner, runner_bytes
        except ImportError as error:
            reason = str(error)
        else:
            decoder = CudaDecoder(model, max_model_len, [layer.window for layer in needs])
            make_runner = partial(CudaRunner, decoder, config.numerics)
            return decoder, make_runner, partial(runner_bytes, decoder, config.numerics)
    if required:
        raise ConfigurationError(f"runner is cuda, but {reason}; use auto.")
    logger.warning("the cuda runner does not apply: %s", reason)
    return None


def _choose_attention(
    runner: str, model: PreTrainedModel, needs: LayerNeeds, max_model_len: int
) -> AttentionBackend:
    """The device's own attention kernel where it applies; the reference where it does not."""
    if runner == "reference":
        return ReferenceAttention()
    on_gpu = model.device.type == "cuda"
    reason = _why_no_kernel(model, needs)
    if reason is None:
        try:
            return _cuda_attention(needs, max_model_len) if on_gpu else CpuAttention()
        except (NativeUnavailable, ImportError) as error:
            reason = str(error)
    if runner == "torch":
        raise ConfigurationError(f"runner is torch, but {reason}; use reference.")
    logger.warning("attention falls back to slow torch code: %s", reason)
    return ReferenceAttention()


def _make_invariant(model: PreTrainedModel, activations: str) -> None:
    """Our own matrix kernel for all layers, where there is one; elsewhere torch's products stay,
    and the self-test at start tells how far their rows depend on each other."""
    if can_pack(model.dtype, model.device):
        try:
            make_invariant(model, activations)
        except NativeUnavailable as error:
            logger.warning("linear layers stay torch's, rows may depend on the batch: %s", error)


def _cuda_attention(needs: LayerNeeds, max_model_len: int) -> AttentionBackend:
    from engine.model.attention.cuda import CudaAttention

    return CudaAttention(needs.heads, max_model_len)


def _why_no_kernel(model: PreTrainedModel, needs: LayerNeeds) -> str | None:
    device = model.device.type
    if device not in ("cpu", "cuda"):
        return f"the model is on {model.device}"
    if device == "cpu" and model.dtype not in CPU_DTYPES:
        return f"the kernel has no {model.dtype}"
    if needs.head_size % 2:
        return f"the size of a head, {needs.head_size}, is odd"
    if needs.heads // needs.groups > MAX_GROUP:
        return f"{needs.heads} heads in {needs.groups} groups exceed its {MAX_GROUP} a group"
    return None


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = model.config.get_text_config().eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
