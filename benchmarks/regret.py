"""The planner on simulated machines and texts: its time over the best fixed draft length.

    python -m benchmarks.regret              # 108 runs, some five minutes on one core
    python -m benchmarks.regret --batch 1    # 36 of them

Six machines, three of them with a draft model; six texts; 1, 8 and 32 sequences. All of it is
deterministic: a virtual clock, and randomness that only seeds decide.
"""

from __future__ import annotations

import argparse
from statistics import mean

from tests.control.fixed import seconds_of_fixed
from tests.control.simulator import World, planner_for
from tests.control.test_simulated import ALL_MACHINES, LATE, TEXTS

TOKENS = {1: 4000, 8: 12_000, 32: 22_400}


def main() -> None:
    """Prints the table, and the runs that are furthest from the best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, choices=TOKENS, help="one number of sequences only")
    batches = [chosen] if (chosen := parser.parse_args().batch) else list(TOKENS)
    texts = TEXTS | {"easy after wrong": LATE}
    found = []
    for batch in batches:
        for text, odds in texts.items():
            for name, machine in ALL_MACHINES.items():
                fixed = seconds_of_fixed(machine, odds, batch, TOKENS[batch])
                planned = World(machine, odds, batch).run(planner_for(machine), TOKENS[batch])
                regret = planned.seconds / min(fixed.values()) - 1.0
                found.append((regret, planned.seconds / fixed[0] - 1.0, f"{name}, {text}, {batch}"))
    regrets = sorted(regret for regret, _, _ in found)
    print(f"{len(found)} runs: time over the best fixed length; negative is faster")
    print(f"mean {mean(regrets):+.2%}   p90 {regrets[int(0.9 * len(regrets))]:+.2%}")
    print(f"max {regrets[-1]:+.2%}   worst against off {max(off for _, off, _ in found):+.2%}")
    for regret, off, name in sorted(found, reverse=True)[:5]:
        print(f"  {regret:+.2%}  (against off {off:+.2%})  {name}")


if __name__ == "__main__":
    main()
