"""What deciding how far to draft costs in a step: milliseconds of processor time.

    python -m benchmarks.deciding

One drafter, sequences that all draft up to eight tokens. The least and the tenth percentile of
many steps: what else the machine does takes time from others of them, not from these.
"""

from __future__ import annotations

import time

from engine.control.adaptive import AdaptivePlanner
from engine.scheduler import StepPlan
from tests.control.simulator import LAPTOP, WITH_DRAFT_MODEL, planner_for
from tests.control.test_adaptive import decodes, make_sequence, step

STEPS = 600


def times_of(planner: AdaptivePlanner, plan: StepPlan) -> list[float]:
    """Milliseconds of each decision, ascending."""
    taken = []
    for _ in range(STEPS):
        begun = time.process_time_ns()
        planner.choose(plan)
        taken.append(1e-6 * (time.process_time_ns() - begun))
    return sorted(taken)


def main() -> None:
    """Prints a line for each number of sequences."""
    machines = {"lookup": LAPTOP, "model": WITH_DRAFT_MODEL["laptop, draft model"]}
    for drafter, machine in machines.items():
        for count in (1, 16, 64):
            planner = planner_for(machine)
            sequences = [make_sequence(drafter, room=10_000, prompt=200) for _ in range(count)]
            plan = decodes(*sequences)
            for _ in range(50):
                step(planner, plan, dear=0.05)
            taken = times_of(planner, plan)
            print(f"{drafter:6} {count:3}: {taken[0]:.3f}, p10 {taken[STEPS // 10]:.3f} ms")


if __name__ == "__main__":
    main()
