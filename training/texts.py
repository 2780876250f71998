"""Text that a target writes by itself: questions, and its answers to them."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.progress import Progress
from transformers import AutoTokenizer

from engine.build import build_engine
from engine.config import EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.core import Engine
from engine.errors import ConfigurationError
from engine.types import Failed, Finished, Request, SamplingParams, Tokens

STREAMS = 64
QUESTION_TOKENS, ANSWER_TOKENS = 192, 320
SAMPLED_EVERY = 5  # every fifth answer is sampled at:
TEMPERATURE = 0.8
CONTEXT = 1024  # longest text
TEXT_SHARE = 0.35  # of the time


@dataclass(slots=True)
class Text:
    """A prompt, and what the target answered.

    Attributes:
        greedy: whether every token of the answer was the target's most likely one.
    """

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    greedy: bool = True


class Wishes(Protocol):
    """What text is wanted."""

    @property
    def target(self) -> Path:
        """Directory of the model that writes."""

    @property
    def tokens(self) -> int:
        """Answer tokens."""

    @property
    def minutes(self) -> float:
        """For everything, of which the text takes its share."""

    @property
    def seed(self) -> int:
        """Of questions and sampled answers."""

    @property
    def threads(self) -> int:
        """Compute threads."""


class Author:
    """Lets an engine write questions and answer them, many at a time.

    Args:
        engine: the target's.
        tokenizer: the target's.
        context: most tokens of one text.
        seed: of questions and sampled answers.
        prompts: questions to answer, over and over; none = it thinks of some itself.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        context: int,
        seed: int,
        prompts: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._context = context
        self._seed = seed
        self._asked = 0
        self._questions: dict[str, Text] = {}
        self._answers: dict[str, Text] = {}
        self._opening = self._find_opening()
        self._prompts = itertools.cycle(prompts) if prompts else None

    def write(self, deadline: float) -> Iterator[Text]:
        """Texts in the order in which they are finished, until `time.monotonic()` is `deadline`.

        Raises:
            EngineError: the engine failed a request.
        """
        while time.monotonic() < deadline:
            while len(self._questions) + len(self._answers) < STREAMS:
                self._ask()
            for event in self._engine.step().events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Tokens):
                    one = self._questions.get(event.request_id) or self._answers[event.request_id]
                    one.answer.extend(event.token_ids)
                elif isinstance(event, Finished):
                    if question := self._questions.pop(event.request_id, None):
                        self._reply(event.request_id, question)
                    else:
                        yield self._answers.pop(event.request_id)

    def _find_opening(self) -> list[int]:
        """Tokens after which a user would write."""
        mark = "QUESTION"
        if self._tokenizer.chat_template:
            before, _, _ = self._chat(mark, ask=False).partition(mark)
            return self._encode(before)
        first = self._tokenizer.bos_token_id
        return [self._tokenizer.eos_token_id if first is None else first]

    def _ask(self) -> None:
        self._asked += 1
        name = str(self._asked)
        if self._prompts is not None:
            self._answer(name, self._read(next(self._prompts)))
            return
        self._questions[name] = Text(self._opening)
        self._submit(name, self._opening, QUESTION_TOKENS, temperature=1.0, top_p=0.95)

    def _reply(self, name: str, question: Text) -> None:
        """Has a question answered, tokenised as a server would, unless it is empty or too long."""
        if self._tokenizer.chat_template:
            said = self._tokenizer.decode(question.answer, skip_special_tokens=True).strip()
            prompt = self._encode(self._chat(said, ask=True)) if said else []
        else:
            prompt = question.prompt + question.answer[: len(question.answer) // 2]
        if prompt and len(prompt) < self._context:
            self._answer(name, prompt)

    def _read(self, question: str) -> list[int]:
        """A given prompt, cut where it leaves no room for an answer."""
        if self._tokenizer.chat_template:
            return self._encode(self._chat(question, ask=True))[-self._context // 2 :]
        return (self._opening + self._encode(question))[: self._context // 2]

    def _answer(self, name: str, prompt: list[int]) -> None:
        greedy = int(name) % SAMPLED_EVERY != 0
        self._answers[name] = Text(prompt, greedy=greedy)
        self._submit(name, prompt, ANSWER_TOKENS, temperature=0.0 if greedy else TEMPERATURE)

    def _submit(self, name: str, prompt: Sequence[int], most: int, **sampling: float) -> None:
        seed = self._seed * 1_000_003 + int(name)
        most = min(most, self._context - len(prompt))
        params = SamplingParams(max_tokens=most, seed=seed, **sampling)  # type: ignore[arg-type]
        self._engine.add(Request(name, tuple(prompt), params, arrival=time.monotonic()))

    def _chat(self, content: str, *, ask: bool) -> str:
        messages = [{"role": "user", "content": content}]
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def read_prompts(path: Path) -> list[str]:
    """Prompts from a file: one a line, or JSON objects with a `prompt`.

    Raises:
        ConfigurationError: it cannot be read, or a line is no prompt; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"prompts is {str(path)!r}, which cannot be read: {error}"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        text: object = line.strip()
        if line.lstrip().startswith("{"):
            try:
                text = json.loads(line)["prompt"]
            except (KeyError, ValueError):
                text = None
        if not isinstance(text, str):
            raise ConfigurationError(
                f"line {number} of {path} is no prompt; write one a line, or JSON objects "
                'such as {"prompt": "..."}.'
            )
        if text:
            found.append(text)
    if not found:
        raise ConfigurationError(f"{path} holds no prompts; write one a line.")
    return found


def write_texts(options: Wishes, progress: Progress, prompts: Sequence[str] = ()) -> list[Text]:
    """Texts with `options.tokens` answer tokens, or as many as the time allows.

    Args:
        prompts: questions to answer; none = the target thinks of some itself.
    """
    own = json.loads((options.target / "config.json").read_text("utf-8"))
    longest = min(own.get("max_position_embeddings", CONTEXT), CONTEXT)
    config = EngineConfig(
        ModelConfig(str(options.target), max_model_len=longest),
        scheduler=SchedulerConfig(decode_stretch=0, max_sequences=STREAMS),
        speculation=SpeculationConfig(mode="off", drafter="none"),
        threads=options.threads,
    )
    engine, tokenizer = build_engine(config).engine, load_tokenizer(options.target)
    author = Author(engine, tokenizer, longest, options.seed, prompts)
    task = progress.add_task("text", total=options.tokens)
    deadline = time.monotonic() + TEXT_SHARE * 60 * options.minutes
    texts: list[Text] = []
    for text in author.write(deadline):
        texts.append(text)
        progress.update(task, advance=len(text.answer), description=f"text: {len(texts)} answers")
        if progress.tasks[task].finished:
            break
    return texts


def save_texts(path: Path, texts: list[Text], target: Path) -> None:
    """All texts end to end, and whose they are; there is a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(
        part,
        target=np.array(str(target)),
        tokens=np.array([i for t in texts for i in (*t.prompt, *t.answer)], dtype=np.int32),
        lengths=np.array([(len(t.prompt), len(t.answer)) for t in texts], dtype=np.int32),
        greedy=np.array([t.greedy for t in texts]),
    )
    os.replace(part, path)


def read_texts(path: Path, target: Path) -> list[Text]:
    """What `save_texts` wrote."""
    stored = np.load(path, allow_pickle=False)
    if str(stored["target"]) != str(target):
        raise ConfigurationError(
            f"{path} was written by {stored['target']}, not by {target}; choose another --text."
        )
    tokens, texts, at = stored["tokens"].tolist(), [], 0
    for (asked, said), greedy in zip(stored["lengths"].tolist(), stored["greedy"], strict=True):
        middle, end = at + asked, at + asked + said
        texts.append(Text(tokens[at:middle], tokens[middle:end], bool(greedy)))
        at = end
    return texts


def load_tokenizer(directory: Path) -> Any:
    """A tokenizer from a local directory; runs no code from there."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
