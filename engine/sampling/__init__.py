"""Logits to tokens: processing, keyed noise, selection, verification, log probabilities.

Pure functions. A row's result depends on that row alone, bit for bit: only elementwise and
exact selection operations ever run on several rows at once, every sum runs on one row.
"""

from engine.sampling.batched import BatchSampler
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import Purpose, gumbel, noise_key, race, uniform
from engine.sampling.processors import Selector, process_logits
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import Draw, Drawn, RowSampler, Sampler
from engine.sampling.verify import (
    Chance,
    KeyedChance,
    Outcome,
    block,
    match,
    probabilities,
    rejection,
)

__all__ = [
    "BatchSampler",
    "Chance",
    "Draw",
    "Drawn",
    "KeyedChance",
    "Outcome",
    "Purpose",
    "RowSampler",
    "Sampler",
    "SamplingRow",
    "Selector",
    "block",
    "gumbel",
    "match",
    "noise_key",
    "probabilities",
    "process_logits",
    "race",
    "rejection",
    "token_logprobs",
    "uniform",
]
