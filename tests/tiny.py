"""A complete language model of a few kilobytes, as a GGUF file: for tests of everything that
lies between a file and a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE = 64, 96, 4, 2, 16
CONTEXT = 4096
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: "1 2" must never be used by a vocabulary whose digits stand alone; "Ġ Ġ" shows where a run of
#: spaces is cut.
MERGES = ["Ġ Ġ", "1 2", "i n"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Weights:
    """What may differ from one tiny model to the next.

    Attributes:
        seed: of the random weights.
        more_tokens: tokens on top of the byte-level vocabulary, so that logits take memory.
        poisoned: a token whose embedding is not a number; the output has weights of its own.
    """

    seed: int = 0
    more_tokens: int = 0
    poisoned: int | None = None


def write_gguf(
    path: Path,
    *,
    splitting: str = "smollm",
    architecture: str = "llama",
    weights: Weights = Weights(),
) -> Path:
    """Writes the model: one layer, byte-level vocabulary, tied embeddings, Q8_0 weights.

    Args:
        splitting: `tokenizer.ggml.pre`.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    tokens = write_tokenizer(writer, splitting, weights.more_tokens)
    _write_weights(writer, tokens, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: gguf.GGUFWriter, splitting: str = "smollm", more: int = 0) -> int:
    """Writes the vocabulary, and returns how many tokens it has."""
    tokens = [*SPECIALS, *bytes_to_unicode().values(), *(m.replace(" ", "") for m in MERGES)]
    tokens += [f"more{i}" for i in range(more)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def _write_weights(writer: gguf.GGUFWriter, vocabulary: int, weights: Weights) -> None:
    random = np.random.default_rng(weights.seed)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(0, 0.3, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        blocks = gguf.quants.quantize(values, kind)
        if name == "token_embd.weight" and weights.poisoned is not None:
            # A block is a half-precision scale and 32 bytes; here no scale is a number.
            row = blocks[weights.poisoned].reshape(-1, 34)
            row[:, :2] = np.array([np.nan], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=kind)

    matrix("token_embd.weight", vocabulary, HIDDEN)
    if weights.poisoned is not None:
        matrix("output.weight", vocabulary, HIDDEN)
    matrix("blk.0.attn_q.weight", HEADS * HEAD_SIZE, HIDDEN)
    matrix("blk.0.attn_k.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
    matrix("blk.0.attn_v.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
    matrix("blk.0.attn_output.weight", HIDDEN, HEADS * HEAD_SIZE)
    matrix("blk.0.ffn_gate.weight", FEED_FORWARD, HIDDEN)
    matrix("blk.0.ffn_up.weight", FEED_FORWARD, HIDDEN)
    matrix("blk.0.ffn_down.weight", HIDDEN, FEED_FORWARD)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))
