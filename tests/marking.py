"""Which tests are slow and why, told by where they lie and by what their file imports.

Whole files are marked here, so that the quick part of the suite need not even import them, and
single tests that take seconds among quick ones. A decorator with the same mark does as well.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: What the quick part leaves out.
SLOW_MARKS = frozenset({"process", "smollm2", "simulation", "slow", "gpu"})

#: Folders and files whose tests are slow although no import tells it.
PLACES = {
    "tests/end_to_end": "process",
    "tests/lossless": "slow",
    "tests/model/cuda": "slow",
    "tests/sampling/test_keyed_verify.py": "slow",
    "tests/server/test_fuzz.py": "slow",
    "tests/server/test_probe.py": "process",
    "tests/tools": "slow",
}

#: Tests of files that are quick otherwise, whose cases together take two seconds or more.
SLOW_TESTS = {
    "tests/draft/test_model_drafter.py": {"test_answers_do_not_depend_on_the_draft_model"},
    "tests/draft/test_portfolio.py": {
        "test_acceptance_after_a_pause_of_fifty_steps_is_what_it_is_without",
        "test_greedy_is_transformers_while_drafters_switch",
        "test_sampled_answers_are_the_same_while_drafters_switch",
    },
    "tests/draft/test_store.py": {"test_the_account_is_honest"},
    "tests/draft/test_tree_drafters.py": {"test_greedy_is_transformers"},
    "tests/loadtest/test_compare.py": {
        "test_the_interval_covers_the_truth_about_as_often_as_it_says"
    },
    "tests/model/test_features.py": {"test_rows_are_bit_equal_in_any_company"},
    "tests/model/test_fewbit_decoder.py": {"test_rows_do_not_depend_on_chunks_pages_or_company"},
    "tests/model/test_invariant.py": {"test_rows_do_not_depend_on_the_batch"},
    "tests/model/test_runners.py": {
        "test_rows_are_bit_equal",
        "test_rows_do_not_depend_on_the_number_of_threads",
    },
    "tests/model/test_trees.py": {"test_rows_of_a_tree_are_those_of_its_ways"},
    "tests/sampling/test_noise.py": {
        "test_a_large_race_draws_from_the_distribution",
        "test_a_race_draws_from_the_distribution",
        "test_a_shared_race_agrees_as_often_as_the_theory_says",
    },
    "tests/sampling/test_processors.py": {"test_a_row_never_depends_on_its_neighbours"},
    "tests/server/test_document.py": {"test_what_the_server_refuses_the_document_refuses"},
    "tests/server/test_structured.py": {"test_nasty_descriptions_are_answered_while_others_stream"},
    "tests/test_busy_streams.py": {"test_answers_do_not_depend_on_how_prompts_are_cut"},
    "tests/test_core.py": {
        "test_every_runner_is_transformers_alone_and_in_company",
        "test_greedy_is_transformers_whatever_is_drafted",
        "test_greedy_is_transformers_when_pages_run_out",
        "test_greedy_is_transformers_with_a_draft_model",
    },
    "tests/test_core_failures.py": {
        "test_abort_after_any_number_of_steps",
        "test_soak",
    },
    "tests/test_core_limits.py": {"test_end_of_text_at_every_draft_position"},
    "tests/test_core_sampling.py": {
        "test_prompt_logprobs_are_those_of_one_pass",
        "test_same_in_small_steps",
        "test_same_tokens_and_logprobs_with_speculation",
        "test_same_under_preemption",
    },
}

#: A file that imports one of these starts processes ...
_STARTS = re.compile(
    r"^(?:from|import) (?:subprocess|tests\.server\.processes|tests\.end_to_end\.serving)\b",
    re.MULTILINE,
)
#: ... and one that imports this simulates whole runs of a planner.
_SIMULATES = re.compile(r"^from tests\.control\.simulator import\b", re.MULTILINE)

#: Files whose imports say otherwise, and why they are quick.
QUICK = {
    "tests/test_architecture.py": "its one process only imports a few modules",
}


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Names of the marks that every test of a file carries.

    Args:
        path: a file of the suite, absolute.
    """
    name = _name(path)
    found = {
        mark for place, mark in PLACES.items() if name == place or name.startswith(place + "/")
    }
    if name not in QUICK:
        text = path.read_text("utf-8")
        found |= {"process"} if _STARTS.search(text) else set()
        found |= {"simulation"} if _SIMULATES.search(text) else set()
    return frozenset(found)


def is_slow(path: Path, test: str) -> bool:
    """Whether a test of a quick file takes seconds.

    Args:
        path: of the file, absolute.
        test: the function's name, without parameters.
    """
    return test in SLOW_TESTS.get(_name(path), ())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
