"""Writes the table of docs/models.md: what becomes of each family of models.

    python tools/families.py                 # all of them, and the table; some minutes
    python tools/families.py llama phi3      # only these, and no table

Each family is a model of random weights, a few layers small, saved and loaded as a server loads
it. What is served has been compared with transformers' own forward by the loader; here its answers
are compared with transformers' `generate` besides, without and with speculation, several at once
and beyond its windows. Exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from engine.build import assemble
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.errors import ConfigurationError
from engine.model.checked import load_checked
from engine.model.loader import LoadedModel
from engine.types import Request, SamplingParams, SpeculationParams, Tokens

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
_MARK = "<!-- written by tools/families.py -->"

VOCAB, NEW_TOKENS = 97, 24
_PROMPTS = (
    tuple(3 + i * 7 % 31 for i in range(40)),
    (5, 6, 7, 8) * 4,
    tuple(3 + i * i % 90 for i in range(9)),
)

#: Sizes by the names that configurations know; each takes those that it has.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,  # spreads the logits, so that rounding cannot turn an argmax
    "sliding_window": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "n_inner": 64,
    "d_model": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "rotary_dim": 4,
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
}  # fmt: skip

_LATENT = {"num_key_value_heads": 4}
_LONG_ROPE = {
    "original_max_position_embeddings": 96,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 96,
        "short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [1.5, 3.0, 5.0, 7.0],
    },
}  # fmt: skip
_GEMMA3N = {
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
_SHARED = _GEMMA3N | {
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GEMMA4 = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}

#: What differs from `_SMALL`. A name may say more behind a blank: which variant it is.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "aria_text": {}, "bamba": {}, "bart": {}, "bert": {},
    "biogpt": {}, "bitnet": {}, "bloom": {}, "codegen": {}, "cohere": {}, "cohere2": {},
    "cohere2_moe": {}, "ctrl": {}, "cwm": {}, "deepseek_v2": _LATENT, "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
    "deepseek_v4": {}, "diffllama": {}, "doge": {}, "dots1": {}, "ernie4_5": {}, "ernie4_5_moe": {},
    "exaone4": {}, "exaone_moe": {}, "falcon": {}, "falcon_h1": {}, "falcon_mamba": {},
    "flex_olmo": {}, "gemma": {}, "gemma2": {},
    "gemma2 without softcap": {"attn_logit_softcapping": None}, "gemma3_text": {},
    "gemma3n_text": _GEMMA3N | {"num_kv_shared_layers": 0},
    "gemma3n_text with shared layers": _SHARED,
    "gemma4_text": _GEMMA4 | {"global_head_dim": 16},
    "gemma4_text with equal heads": _GEMMA4 | {"global_head_dim": 8}, "glm": {}, "glm4": {},
    "glm4_moe": {}, "glm4_moe_lite": _LATENT, "gpt2": {}, "gpt_bigcode": {},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "gpt_neox": {}, "gpt_neox_japanese": {}, "gpt_oss": {}, "gptj": {}, "granite": {},
    "granitemoe": {}, "granitemoehybrid": {}, "granitemoeshared": {}, "helium": {},
    "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {}, "internlm3": {}, "jais2": {}, "jamba": {},
    "jetmoe": {}, "kimi_linear": {}, "lfm2": _CONVOLUTIONS, "lfm2_moe": _CONVOLUTIONS, "llama": {},
    "llama with longrope": _LONG_ROPE, "llama4_text": {"attention_chunk_size": 96}, "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8}, "mellum": {}, "mimo_v2_flash": {},
    "minicpm3": _LATENT, "minimax": {}, "minimax_m2": {}, "ministral": {}, "ministral3": {},
    "mistral": {}, "mixtral": {}, "modernbert-decoder": {}, "mpt": {}, "nanochat": {},
    "nemotron": {}, "olmo": {}, "olmo2": {}, "olmo3": {}, "olmo_hybrid": {}, "olmoe": {},
    "openai-gpt": {}, "opt": {}, "persimmon": {}, "phi": {}, "phi3": {},
    "phi3 with longrope": _LONG_ROPE, "phimoe": {},
    "phimoe without a window": {"sliding_window": None}, "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "max_window_layers": 2}, "qwen2_moe": {},
    "qwen3": {}, "qwen3_5_text": {}, "qwen3_next": {}, "qwen3_moe": {}, "recurrent_gemma": {},
    "rwkv": {}, "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {}, "vaultgemma": {},
    "xglm": {}, "youtu": _LATENT, "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a family.

    Attributes:
        family: its name in `FAMILIES`.
        architecture: the class of its model.
        served: "native", "torch", "reference", "refused" or "WRONG".
        said: what the loader said about it, or what is wrong.
    """

    family: str
    architecture: str
    served: str
    said: str

    @property
    def row(self) -> str:
        """Its line of the table. Figures vary from machine to machine and are left out."""
        said = re.sub(r"but for \S+ of their spread", "but for rounding", self.said)
        return f"| {self.family} | {self.architecture} | {self.served} | {said} |"


def make_config(family: str) -> PreTrainedConfig:
    """A small configuration of a family."""
    kind = CONFIG_MAPPING[family.split()[0]]
    fields = getattr(kind, "__dataclass_fields__", {})
    known = {*inspect.signature(kind.__init__).parameters, *fields, *kind.attribute_map}
    common = {name: value for name, value in _SMALL.items() if name in known}
    return kind(**(common | FAMILIES[family]))


def examine(family: str) -> Outcome:
    """Makes, saves, loads and asks a model of a family."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # else every bias is 0 and every norm 1
            parameter.data += 0.2 * torch.randn_like(parameter)
    name = type(model).__name__
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        try:
            loaded = load_checked(Path(directory), ModelConfig(directory, dtype="float32"))
        except ConfigurationError as error:
            return Outcome(family, name, "refused", str(error).replace(directory, "the model"))
        wanted = _generate(Path(directory))
    for mode in ("off", "fixed"):
        if (found := _answer(loaded, mode)) != wanted:
            said = f"speculation {mode}: {found}, but transformers says {wanted}"
            return Outcome(family, name, "WRONG", said)
    limit, own = loaded.max_model_len, _SMALL["max_position_embeddings"]
    shorter = f"; up to {limit} tokens only" if limit < own else ""
    return Outcome(family, name, loaded.runner_name, loaded.checked + shorter)


def _generate(directory: Path) -> list[list[int]]:
    """transformers' greedy continuations, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    answers = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def _answer(loaded: LoadedModel, mode: str) -> list[list[int]]:
    """Our engine's, all prompts at once; drafts are partly right, partly wrong."""
    config = EngineConfig(
        ModelConfig("family"),
        cache=CacheConfig(num_pages=64),
        speculation=SpeculationConfig(mode=mode, max_draft=4),
    )
    engine = assemble(config, loaded).engine
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(_PROMPTS):
        ask = SpeculationParams(prediction=prompt if i % 2 else ())
        engine.add(Request(str(i), prompt, sampling, ask, arrival=time.monotonic()))
    answers: list[list[int]] = [[] for _ in _PROMPTS]
    while engine.has_work:
        for event in engine.step().events:
            if isinstance(event, Tokens):
                answers[int(event.request_id)].extend(event.token_ids)
    return answers


def read_table() -> dict[str, str]:
    """The rows of the document, by family."""
    _, _, table = DOCUMENT.read_text(encoding="utf-8").partition(_MARK)
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def write_table(outcomes: list[Outcome]) -> None:
    """Puts the rows behind the mark in the document."""
    text, _, _ = DOCUMENT.read_text(encoding="utf-8").partition(_MARK)
    lines = ["| family | class | served | what the check says |", "|---|---|---|---|"]
    lines += [outcome.row for outcome in outcomes]
    DOCUMENT.write_text(text + _MARK + "\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


def main(families: list[str]) -> int:
    """Examines families, all if none is named; returns the exit status."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outcomes = []
    for family in families or FAMILIES:
        outcomes.append(examine(family))
        print(outcomes[-1].row, flush=True)
    if not families:
        write_table(outcomes)
    return int(any(outcome.served == "WRONG" for outcome in outcomes))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:  # what was found is not kept
        from engine.model.paths import cache_directory

        Path(home, "native").symlink_to(cache_directory() / "native")
        os.environ["SPECSERVE_HOME"] = home
        sys.exit(main(sys.argv[1:]))
