"""Every entry of the ledger has a test, and there are entries of our own."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.ledger import BAD_INPUTS
from tests.server.bad_rows import BAD_BODIES, BAD_FIELDS
from tests.server.found_rows import FOUND

TESTS = Path(__file__).parent


def numbers(decorator: ast.expr) -> list[int]:
    """Arguments of a `pytest.mark.bad_input`."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("bad_input"):
        return []
    return [ast.literal_eval(argument) for argument in decorator.args]


def test_every_bad_input_has_a_test() -> None:
    assert set(BAD_INPUTS) == set(range(1, 61))
    tested = Counter(number for number, *_ in (*BAD_FIELDS, *BAD_BODIES))
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    tested.update(numbers(decorator))
    assert set(tested) == set(BAD_INPUTS)


def test_numbers_are_read_from_marks_alone() -> None:
    found = ast.parse("@pytest.mark.bad_input(3, 4)\n@pytest.mark.skip(5)\ndef test(): ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    assert [numbers(decorator) for decorator in found.decorator_list] == [[3, 4], []]


def test_fuzzing_has_added_rows_of_our_own() -> None:
    known = {str(fields) for _, fields, _ in BAD_FIELDS}
    own = {(path, str(fields)) for path, fields, _ in FOUND if str(fields) not in known}
    assert len(own) >= 20
