"""Past answers, kept so that repeated traffic drafts from what was said yesterday: a suffix store,
or n-gram speculation across requests.

Every answer is kept with the end of its prompt, so that the first token of a question asked
again has something to match. An index knows where each run of `_ANCHOR` tokens occurred; of the
latest occurrences the one whose text before it agrees the longest is followed, token by token,
for as long as the sequence says the same. So a token costs one comparison while a match lasts,
and one look-up while there is none.

Tenants have indexes of their own and never see each other's answers. The memory is one for all;
when it is full, the answers that were drafted from least recently go first, as a whole.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

#: Tokens that must agree before stored text is followed.
_ANCHOR = 4

#: Tokens of the prompt's end that are kept with its answer. At its first token that many are
#: an anchor, too: a question asked again finds its answer among all that begin alike.
_CONTEXT = 32

#: Latest occurrences that are compared, and how far back.
_MOST_COMPARED = 16
_LONGEST = 64

#: What is charged for an answer, for each of its tokens, and for each place in the index: what
#: CPython takes at most for arrays, numbers, lists and dictionary slots.
_ANSWER_BYTES = 1024
_TOKEN_BYTES = 4
_PLACE_BYTES = 320


@dataclass(slots=True, eq=False)
class _Answer:
    """One text: the end of a prompt, and what was said after it."""

    tenant: str
    text: array[int]
    start: int  # where the answer begins
    alive: bool = True

    @property
    def num_bytes(self) -> int:
        places = len(self.text) - self.start + 1
        return _ANSWER_BYTES + _TOKEN_BYTES * len(self.text) + _PLACE_BYTES * places


@dataclass(slots=True)
class _Tenant:
    """Answers of one tenant by their text, and (answer, position) by the tokens before it."""

    answers: dict[bytes, _Answer] = field(default_factory=dict)
    places: defaultdict[int, list[tuple[_Answer, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )


@dataclass(slots=True)
class StoreCursor:
    """Where a sequence stands in a stored answer.

    Attributes:
        length: tokens before the cursor that agree; 0 = nowhere.
    """

    length: int = 0
    _answer: _Answer | None = None
    _position: int = 0

    def draft(self, max_tokens: int) -> list[int]:
        """What the answer says next."""
        if self._answer is None:
            return []
        return self._answer.text[self._position : self._position + max_tokens].tolist()


class AnswerStore:
    """Answers of all tenants within a bound on memory.

    Args:
        limit: bytes.

    Attributes:
        num_bytes: that are taken, never more than `limit`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._tenants: dict[str, _Tenant] = {}
        self._answers: OrderedDict[_Answer, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Answers."""
        return len(self._answers)

    def add(self, tenant: str, prompt: Seq[int], answer: Seq[int]) -> None:
        """Keeps an answer, unless it is empty or larger than all the memory."""
        context = prompt[-_CONTEXT:]
        new = _Answer(tenant, array("i", [*context, *answer]), len(context))
        if not answer or new.num_bytes > self.limit:
            return
        own = self._tenants.setdefault(tenant, _Tenant())
        known = own.answers.setdefault(new.text.tobytes(), new)
        if known is not new:  # said before, word for word
            self._answers.move_to_end(known)
            return
        self._answers[new] = None
        self.num_bytes += new.num_bytes
        for key, position in _places(new):
            own.places[key].append((new, position))
        while self.num_bytes > self.limit:
            self._drop(next(iter(self._answers)))

    def follow(self, cursor: StoreCursor, tenant: str, tokens: Seq[int], known: int) -> None:
        """Moves a sequence's cursor over the tokens it has not seen.

        Args:
            cursor: is changed.
            tenant: of the sequence.
            tokens: prompt and answer so far.
            known: how many of them the cursor has seen.
        """
        answer, position = cursor._answer, cursor._position
        if answer is not None and answer.alive:
            new = tokens[known:]
            if answer.text[position : position + len(new)].tolist() == new:
                cursor._position = position + len(new)
                cursor.length += len(new)
                if cursor._position < len(answer.text):
                    return
        cursor._answer, cursor._position, cursor.length = self._longest(tenant, tokens)

    def _longest(self, tenant: str, tokens: Seq[int]) -> tuple[_Answer | None, int, int]:
        """The place, among the latest ones, before which most tokens agree; the latest wins."""
        own = self._tenants.get(tenant)
        if own is None:
            return None, 0, 0
        tail = tokens[-_LONGEST:]
        for anchor in (_CONTEXT, _ANCHOR):
            latest = own.places.get(_key(tail, anchor), [])[-_MOST_COMPARED:]
            found = [(_agreement(a.text, at, tail), n) for n, (a, at) in enumerate(latest)]
            length, number = max(found, default=(0, 0))
            if length >= _ANCHOR:
                answer, position = latest[number]
                self._answers.move_to_end(answer)
                return answer, position, length
        return None, 0, 0

    def _drop(self, answer: _Answer) -> None:
        del self._answers[answer]
        answer.alive = False
        self.num_bytes -= answer.num_bytes
        own = self._tenants[answer.tenant]
        del own.answers[answer.text.tobytes()]
        for key, position in _places(answer):
            places = own.places[key]
            places.remove((answer, position))
            if not places:
                del own.places[key]
        if not own.answers:
            del self._tenants[answer.tenant]


def _places(answer: _Answer) -> list[tuple[int, int]]:
    """(key, position) of every place in the answer from which it could be followed."""
    text, start = answer.text.tolist(), answer.start
    places = [
        (_key(text[end - _ANCHOR : end], _ANCHOR), end)
        for end in range(max(start, _ANCHOR), len(text))
    ]
    if start > _ANCHOR:
        places.append((_key(text[:start], _CONTEXT), start))
    return places


def _key(tokens: Seq[int], count: int) -> int:
    return hash(tuple(tokens[-count:]))


def _agreement(text: array[int], position: int, tail: Seq[int]) -> int:
    """How many tokens before a position are those at the end of `tail`."""
    before = text[max(0, position - len(tail)) : position]
    length = 0
    for there, here in zip(reversed(before), reversed(tail), strict=False):
        if there != here:
            break
        length += 1
    return length
