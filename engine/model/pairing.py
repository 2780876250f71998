"""Whether a draft model speaks the target's language: same tokens, same ids."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import ModelNotSupported

_FILE = "tokenizer.json"


def check_pair(target: Path, draft: Path) -> None:
    """Compares the tokenizers of two model directories.

    A draft token is an id; it is worth nothing if the two models mean different text by it.
    Output layers may be padded to different sizes: only the tokens count.

    Raises:
        ModelNotSupported: naming the first tokens that differ.
    """
    ours, theirs = _read(target), _read(draft)
    for what in ("vocabulary", "special tokens"):
        different = sorted(
            (
                token
                for token in ours[what].keys() | theirs[what].keys()
                if ours[what].get(token) != theirs[what].get(token)
            ),
            key=lambda token: (ours[what].get(token, theirs[what].get(token, 0)), token),
        )
        if different:
            token = different[0]
            raise ModelNotSupported(
                f"the draft model's {what} differ from the target's in {len(different)} entries: "
                f"{token!r} is {_say(ours[what].get(token))} in {target.name} and "
                f"{_say(theirs[what].get(token))} in {draft.name}. Choose a draft model with the "
                "same tokenizer, or the lookup drafter."
            )


def _read(directory: Path) -> dict[str, dict[str, int]]:
    """Token -> id of the vocabulary and of the added special tokens."""
    path = directory / _FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotSupported(
            f"{path} cannot be read, so the draft model's tokens cannot be compared with the "
            f"target's: {error}"
        ) from error
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram models keep [token, score] pairs
        vocabulary = {entry[0]: i for i, entry in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", ())}
    special = {e["content"]: e["id"] for e in content.get("added_tokens", ()) if e.get("special")}
    return {"vocabulary": {**vocabulary, **added}, "special tokens": special}


def _say(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"
