"""Damages correct programs in every known way and counts what the verifier says; prints a table, or writes it into the docs.

    python tools/mutation_score.py                    # every kind of damage, one site a program and kind
    python tools/mutation_score.py --models uneven --per-kind 100
    python tools/mutation_score.py --write            # also renews the table in docs/verification.md

Every mutant is verified and run on all ranks of its mesh, on real data. *Harmful* means that an output or a gradient of
some rank differs from the correct program's, or that the mutant cannot run. The exit status is 1 if a harmful mutant is
accepted or a correct program rejected.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from hyper_parallel.errors import CaptureError, VerificationError  # noqa: E402
from passes.verify import verify_programs  # noqa: E402
from tests.mutations import KINDS, MEMORY_KINDS, mutants  # noqa: E402
from tests.program_cases import Setting, build, differs, settings, simulate  # noqa: E402
from tests.tp_mutations import CHANGES, tp_mutants  # noqa: E402

PAGE = ROOT / "docs" / "verification.md"
BEGIN, END = "<!-- mutation table -->\n", "<!-- end of mutation table -->\n"


def _kinds(setting: Setting) -> list[str]:
    """Kinds of damage that a setting gets; the tensor-parallel pass, which traces again, only where little else is set."""
    fields = dict(setting.policy)
    traced_again = fields.keys() == {"tp_plan"} and len(setting.shape) < 3
    return [*KINDS, *(CHANGES if traced_again else ())]


class Score:
    """What has been counted, by kind of damage."""

    def __init__(self) -> None:
        self.mutants: Counter[str] = Counter()
        self.harmful: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.survivors: list[str] = []
        self.false_alarms: list[str] = []
        self.programs = 0
        self.verify_seconds = 0.0

    def score_setting(self, setting: Setting, per_kind: int) -> None:
        """Verifies the correct programs of a setting and their mutants."""
        graphs = build(setting)
        for gm in graphs.values():
            gm.meta["setting"] = setting
        self.programs += 1
        start = time.perf_counter()
        try:
            verify_programs(graphs)
        except VerificationError as error:
            self.false_alarms.append(f"{setting}: {error}")
            return
        self.verify_seconds += time.perf_counter() - start
        wanted = simulate(graphs)
        for kind in _kinds(setting):
            makers = list(tp_mutants(setting, kind) if kind in CHANGES else mutants(graphs, kind))
            step = max(1, len(makers) // per_kind)
            for make in makers[::step][: 1 if kind in CHANGES else per_kind]:
                try:
                    mutant = make()
                except CaptureError:  # what is damaged cannot even be traced
                    continue
                self.mutants[kind] += 1
                why = differs(lambda graphs=mutant.graphs: simulate(graphs), wanted)
                harmful = bool(why) or kind in MEMORY_KINDS
                self.harmful[kind] += harmful
                try:
                    if mutant.refused:
                        raise VerificationError(mutant.refused)
                    verify_programs(mutant.graphs)
                except VerificationError:
                    self.rejected[kind] += 1
                    continue
                except Exception as crash:  # an error of the verifier, not of the mutant
                    why, harmful = f"the verifier fails: {type(crash).__name__}: {crash}", True
                if harmful:
                    self.survivors.append(f"{setting}: {kind} at {mutant.where}: {why}")

    def add(self, other: Score) -> None:
        """Adds what another process has counted."""
        for mine, theirs in (
            (self.mutants, other.mutants),
            (self.harmful, other.harmful),
            (self.rejected, other.rejected),
        ):
            mine.update(theirs)
        self.survivors += other.survivors
        self.false_alarms += other.false_alarms
        self.programs += other.programs
        self.verify_seconds += other.verify_seconds

    @property
    def missed(self) -> Counter[str]:
        """Harmful mutants that were accepted, by kind."""
        return Counter(line.split(": ", 2)[1].split(" at ")[0] for line in self.survivors)

    def table(self) -> str:
        """The counts as Markdown."""
        rows = [
            "| damage | mutants | harmful | rejected | harmful and accepted |",
            "|---|---:|---:|---:|---:|",
        ]
        for kind in (*KINDS, *CHANGES):
            rows.append(
                f"| {kind} | {self.mutants[kind]} | {self.harmful[kind]} | {self.rejected[kind]} | {self.missed[kind]} |"
            )
        total = [sum(c.values()) for c in (self.mutants, self.harmful, self.rejected)]
        rows.append(
            f"| **all** | **{total[0]}** | **{total[1]}** | **{total[2]}** | **{len(self.survivors)}** |"
        )
        caught = 100 * (total[1] - len(self.survivors)) / max(total[1], 1)
        rows.append("")
        rows.append(
            f"{self.programs} correct programs (model × mesh × policy), {len(self.false_alarms)} false alarms; {total[0]} "
            f"mutants, {total[1]} of them harmful, {caught:.1f} % of these rejected. Some harmless ones are rejected too: "
            f"they compute the right numbers by another way than the plan says."
        )
        return "\n".join(rows) + "\n"


def _scored(chosen: Sequence[Setting], per_kind: int, seconds: float, jobs: int) -> Score:
    """The score of many settings, by several processes."""
    shares = [(chosen[i::jobs], per_kind, seconds) for i in range(jobs)]
    if jobs == 1:
        return _share(*shares[0])
    total = Score()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for score in pool.starmap(_share, shares):
            total.add(score)
    return total


def _share(chosen: Sequence[Setting], per_kind: int, seconds: float) -> Score:
    torch.set_num_threads(1)
    score, start = Score(), time.perf_counter()
    for index, setting in enumerate(chosen):
        if time.perf_counter() - start > seconds:
            break
        score.score_setting(setting, per_kind)
        done = sum(score.mutants.values())
        print(
            f"[{index + 1}/{len(chosen)}] {time.perf_counter() - start:5.0f} s {done:6} mutants  {setting}",
            file=sys.stderr,
            flush=True,
        )
    return score


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="*", help="keys of tests.models.CASES; all by default")
    parser.add_argument("--per-kind", type=int, default=1, help="mutants a program and kind")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no program after this time"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; each takes its share")
    parser.add_argument(
        "--start", type=int, default=0, help="skip so many programs (to run in parts)"
    )
    parser.add_argument(
        "--write", action="store_true", help="renew the table in docs/verification.md"
    )
    options = parser.parse_args(argv)
    chosen = [s for s in settings() if not options.models or s.model in options.models]
    chosen.sort(
        key=lambda s: hashlib.sha256(str(s).encode()).hexdigest()
    )  # any part is a fair sample
    chosen = chosen[options.start :]
    score = _scored(chosen, options.per_kind, options.seconds, options.jobs)
    print(score.table())
    for line in (*score.survivors, *score.false_alarms):
        print(line)
    if options.write:
        text = PAGE.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text(head + BEGIN + "\n" + score.table() + "\n" + END + tail)
    return 1 if score.survivors or score.false_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
