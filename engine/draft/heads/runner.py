"""A head as the engine keeps models: loaded from a directory, given pages, timed at start."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.config import ModelConfig
from engine.draft.heads.checkpoint import read_weights
from engine.draft.heads.config import HeadConfig, read_config
from engine.draft.heads.eagle_model import EagleModel
from engine.model.choices import choose_device, choose_dtype, choose_kv_dtype
from engine.model.loader import LoadedModel
from engine.model.passes import Pass, start_timer


class HeadRunner:
    """A head and its store.

    Args:
        model: the head.
        num_pages: pages of the pool; the store is allocated here.
        page_size: tokens per page.
    """

    #: No two rows of a pass need to come out alike: the target checks what comes of them.
    min_rows = 1

    def __init__(self, model: EagleModel, num_pages: int, page_size: int) -> None:
        self.model = model
        self.device = model.device
        self.store = KVStore(model.shape, num_pages, page_size, self.device)
        self._wide = torch.empty(0)  # [rows, vocab], -inf where the head knows no token

    @torch.inference_mode()
    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """A round over rows without a past, for its time: see `Runner.forward`."""
        del features
        end = start_timer(self.device)
        shape = (batch.input_ids.numel(), self.model.config.hidden)
        states = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        logits, _ = self.run(batch, states)
        return Pass(logits[: batch.num_logits], end())

    @torch.inference_mode()
    def remember(self, batch: Batch, features: Tensor) -> Tensor:
        """Takes the target's features [n, width] of a batch's rows into the store.

        Returns:
            The rows as states [n, hidden], which `run` takes.
        """
        states = self.model.fuse(features)
        self.model.remember(batch, states, self.store)
        return states

    @torch.inference_mode()
    def run(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        """One round over all rows of a batch.

        Args:
            states: [n, hidden]

        Returns:
            Logits [n, vocab] of the target's tokens, valid until the next round, and the states
            [n, hidden] of that round.
        """
        logits, states = self.model.run(batch, states, self.store)
        config, count = self.model.config, len(logits)
        if config.draft_vocab == config.vocab:
            return logits.float(), states
        if len(self._wide) < count:
            shape = (count, config.vocab)
            self._wide = torch.full(shape, -torch.inf, device=self.device)
        wide = self._wide[:count]
        return wide.index_copy_(1, self.model.ids, logits.float()), states


def load_head(config: ModelConfig) -> LoadedModel:
    """A head from a local directory.

    Raises:
        ModelNotSupported: it cannot be drafted with, and why.
        ConfigurationError: dtype or device cannot be had.
    """
    directory = Path(config.path)
    own = read_config(directory)
    return adopt_head(own, read_weights(directory, own), config)


def adopt_head(own: HeadConfig, weights: dict[str, Tensor], config: ModelConfig) -> LoadedModel:
    """A head that is in memory already."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    kept = choose_kv_dtype(config.kv_dtype, dtype, device)
    model = EagleModel(own, weights, dtype, device, kept)
    return LoadedModel(
        make_runner=partial(HeadRunner, model),
        runner_name="head",
        shape=model.shape,
        device=device,
        vocab_size=own.vocab,
        max_model_len=model.longest,
        eos_token_ids=frozenset(),
        taps=own.taps_of,
        dtype=model.dtype,
    )
