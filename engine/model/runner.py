"""Runs a transformer over a packed batch with paged K/V. One class for target and draft models.

The model's own code stays untouched: it is loaded with an attention implementation registered
in transformers' attention interface, which finds the step's batch in the keyword arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.batch import Batch
from engine.cache.store import CacheShape, KVStore
from engine.errors import ModelNotSupported
from engine.model.attention.base import Attend, AttentionBackend, AttentionCall, TreeAttention
from engine.model.fewbit_linear import PackedFewbitLinear
from engine.model.linear import PackedLinear
from engine.model.passes import Pass, check_layers, start_timer

#: Name under which paged attention is registered with transformers.
ATTENTION = "specserve_paged"

#: Arguments of the attention interface that change the result and are not implemented.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, G, T, D]."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ModelNotSupported(
                f"{type(module).__name__} uses {name}, which paged attention does not implement."
            )
    heads = query.shape[1], key.shape[1], value.shape[1]
    sizes = {query.shape[3], key.shape[3], value.shape[3]}
    if len(sizes) > 1 or heads[1] != heads[2] or heads[0] % heads[1]:
        shapes = ", ".join(f"{t.shape[1]} of {t.shape[3]}" for t in (query, key, value))
        raise ModelNotSupported(
            f"{type(module).__name__} attends with query, key and value heads of {shapes} "
            "elements; the paged cache holds keys and values of one shape."
        )
    if "paged_attend" not in kwargs:
        raise ModelNotSupported(
            f"{type(module).__name__} keeps the arguments of its attention to itself, so it "
            "cannot be told where the paged cache is."
        )
    attend: Attend = kwargs["paged_attend"]
    call = AttentionCall(
        layer=getattr(module, "layer_idx", None),  # type: ignore[arg-type]
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        scale=kwargs["scaling"],
        window=_window(kwargs),
    )
    return attend(call).unsqueeze(0), None


def _window(kwargs: dict[str, Any]) -> int:
    """What a module says it sees, and not what its configuration may say."""
    return kwargs.get("sliding_window") or 0


AttentionInterface.register(ATTENTION, _paged_attention)
AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)


class ModelRunner:
    """A causal language model, its K/V store and an attention backend.

    Args:
        model: loaded with `attn_implementation=ATTENTION`.
        backend: how to attend.
        shape: what a token stores.
        num_pages: pages of the pool; the store is allocated here.
        page_size: tokens per page.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        shape: CacheShape,
        num_pages: int,
        page_size: int,
    ) -> None:
        self.model = model
        self.backend = backend
        self.device: torch.device = model.device
        self.store = KVStore(shape, num_pages, page_size, self.device)
        self.branches = isinstance(backend, TreeAttention)
        #: Where layers are torch's own, a single row takes another path and is rounded otherwise.
        packed = (PackedLinear, PackedFewbitLinear)
        self.min_rows = 1 if any(isinstance(m, packed) for m in model.modules()) else 2

    @functools.cached_property
    def _layers(self) -> torch.nn.ModuleList:
        return decoder_layers(self.model)

    @torch.inference_mode()
    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`; the logits are of the model's dtype."""
        check_layers(features, self.store.shape.num_layers)
        end = start_timer(self.device)
        with self._keeping(features) as states:
            output = self.model(
                input_ids=batch.input_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                paged_attend=self.backend.prepare(batch, self.store),
            )
        rows = batch.input_ids.numel() - batch.num_padding_rows
        kept = {layer: state[0, :rows].float() for layer, state in states.items()}
        return Pass(output.logits[0, : batch.num_logits], end(), kept)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeRunner.move`."""
        assert isinstance(self.backend, TreeAttention)
        self.backend.move(self.store, sources, targets)

    @contextlib.contextmanager
    def _keeping(self, features: tuple[int, ...]) -> Iterator[dict[int, torch.Tensor]]:
        """Has the model's layers hand over their hidden states [1, T, hidden] while it runs."""
        states: dict[int, torch.Tensor] = {}

        def keep_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[0] = args[0] if args else kwargs["hidden_states"]

        def keep_output(layer: int, output: Any) -> None:
            states[layer] = output if isinstance(output, torch.Tensor) else output[0]

        with contextlib.ExitStack() as hooks:
            for layer in features:
                if layer == 0:
                    hook = self._layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
                else:
                    hook = self._layers[layer - 1].register_forward_hook(
                        lambda _module, _input, output, layer=layer: keep_output(layer, output)
                    )
                hooks.callback(hook.remove)
            yield states


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The model's decoder layers, first to last.

    Raises:
        ModelNotSupported: it has no such list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ModelNotSupported(
        f"{type(model).__name__} has no list of its {count} decoder layers, so its hidden states "
        "cannot be read; use a drafter that needs none."
    )
