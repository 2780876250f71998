"""What a head's checkpoint says of itself: its `config.json`, in the forms that are published.

Two forms are read:

* that of the `speculators` library: `speculators_model_type`, the layer under
  `transformer_layer_config`;
* that of the EAGLE-3 authors: a Llama configuration with a `draft_vocab_size`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelNotSupported

#: Layers' families: both compute the same, but for norms of single heads in Qwen3.
FAMILIES = ("llama", "qwen3")

_EAGLE = "eagle3"
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """An EAGLE-3 head.

    Attributes:
        layer: configuration of its decoder layer, as transformers spells it; `vocab_size` is the
            target's.
        draft_vocab: tokens that it may guess.
        taps: layers of the target whose hidden states it reads, as a runner numbers them; None =
            those that the authors chose: see `taps_of`.
        norm_before_residual: the layer adds to the normed hidden state instead of the plain one.
        norm_before_fc: the features are normed together before they are fused.
        fc_norm: ... or each by itself.
        norm_output: the next round is fed the normed state instead of the plain one.
    """

    layer: dict[str, Any]
    draft_vocab: int
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def hidden(self) -> int:
        """Width of its hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def vocab(self) -> int:
        """Tokens of the target."""
        return int(self.layer["vocab_size"])

    @property
    def family(self) -> str:
        """Of its decoder layer."""
        return str(self.layer.get("model_type", "llama"))

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers it reads of a target with so many: by default the second, the middle one and
        the third from the top, counted by what they put out."""
        return self.taps or (2, num_layers // 2, num_layers - 3)


def read_config(directory: Path) -> HeadConfig:
    """The configuration of a head.

    Raises:
        ModelNotSupported: it is no head, or of a kind that is not drafted with here.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{path} cannot be read, so there is no head: {error}") from error
    try:
        config = _parse(directory, content)
        _check(directory, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelNotSupported(
            f"{path} is no head's configuration: {type(error).__name__} {error}"
        ) from error
    return config


def _parse(directory: Path, content: dict[str, Any]) -> HeadConfig:
    kind = content.get("speculators_model_type")
    if kind is not None and kind != _EAGLE:
        raise ModelNotSupported(
            f"{directory} holds a {kind} head; heads of kind {_EAGLE} are drafted with here."
        )
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    marks: dict[str, bool] = {name: bool(content.get(name, False)) for name in flags}
    if kind is not None:
        taps = content.get("eagle_aux_hidden_state_layer_ids")
        layer = dict(content["transformer_layer_config"])
        return HeadConfig(layer, int(content["draft_vocab_size"]), _taps(taps), **marks)
    if "draft_vocab_size" not in content:
        raise ModelNotSupported(
            f"{directory} holds no head: its config.json names neither speculators_model_type nor "
            "draft_vocab_size. A whole model drafts as drafter model."
        )
    own = content.get("eagle_config") or {}
    taps = own.get("eagle_aux_hidden_state_layer_ids")
    return HeadConfig(dict(content), int(content["draft_vocab_size"]), _taps(taps), **marks)


def _taps(found: list[int] | None) -> tuple[int, ...] | None:
    return tuple(map(int, found)) if found else None


def _check(directory: Path, config: HeadConfig) -> None:
    """Refuses what the head's pass would not compute."""
    layer = config.layer
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    depth = int(layer.get("num_hidden_layers", 1))
    if config.family not in FAMILIES:
        why = f"its layer is of family {config.family}, and {' and '.join(FAMILIES)} are known"
    elif depth != 1:
        why = f"it has {depth} decoder layers, and EAGLE-3 has one"
    elif layer.get("hidden_act", "silu") != "silu":
        why = f"its activation is {layer['hidden_act']}, and only silu is known"
    elif kind not in _STATIC_ROPE:
        why = f"its rotary embedding is {kind}, and {', '.join(_STATIC_ROPE)} are known"
    elif "sliding_attention" in (layer.get("layer_types") or ()):
        why = "its layer attends to a sliding window only"
    elif not 0 < config.draft_vocab <= config.vocab:
        why = f"it guesses {config.draft_vocab} tokens of a vocabulary of {config.vocab}"
    else:
        return
    raise ModelNotSupported(f"{directory} holds a head that cannot draft here: {why}.")


def check_head(target: Path, head: Path) -> None:
    """Compares a head with the target it is to draft for.

    Args:
        target, head: directories of the two models.

    Raises:
        ModelNotSupported: they do not fit together, and why.
    """
    config = read_config(head)
    try:
        own = json.loads((target / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{target / 'config.json'} cannot be read: {error}") from error
    own = own.get("text_config") or own
    fed = int(config.layer.get("target_hidden_size") or config.hidden)
    for what, theirs, ours in (
        ("hidden states are", own.get("hidden_size"), fed),
        ("vocabulary is", own.get("vocab_size"), config.vocab),
    ):
        if theirs is not None and theirs != ours:
            raise ModelNotSupported(
                f"the head in {head} was made for another model: its target's {what} "
                f"{ours} wide, those of {target.name} {theirs}; take the head of this very model."
            )
    layers = int(own.get("num_hidden_layers") or 0)
    if layers and not all(0 <= tap <= layers for tap in config.taps_of(layers)):
        named = ", ".join(map(str, config.taps_of(layers)))
        raise ModelNotSupported(
            f"the head in {head} reads layers {named}, but {target.name} has {layers}; take the "
            "head of this very model."
        )
