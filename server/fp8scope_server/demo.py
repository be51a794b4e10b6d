"""`fp8scope demo`: the whole loop on this machine, with a real fault in a real FP8 run.

A small decoder trains in FP8 under ZeRO-2 on two CPU ranks. One block takes the scales of its activations
from an amax history (delayed scaling). At a known step that history freezes, as a stuck cache would do,
while the norm gain in front of it grows by 1.1 a step: values run past the largest code. Saturation,
distortion and the GEMM error of that block pass their limits; a rule sends it to BF16, on both ranks at
the same step; the gain stops growing, the history is released, and the rule takes the block back to FP8
by what its shadow measurements say. The same run with the rule off is the control.
"""

import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fp8scope_protocol.access import data_home
from fp8scope_protocol.bounds import check_whole
from fp8scope_protocol.command_line import Parser
from fp8scope_protocol.documents import RunDocument
from fp8scope_protocol.errors import Fp8scopeError, Invalid
from fp8scope_protocol.rules import Clause, Condition, Rule
from fp8scope_server.children import Child
from fp8scope_server.interrupt import raise_on_terminate
from fp8scope_server.reader import Reader
from fp8scope_server.story import read_story
from fp8scope_server.up import Services, add_ports, ports, services, wait_for_interrupt

DEFAULT_STEPS = 110
CONTROL_EVERY = 5
"""Nobody waits for the control's measurements: its loss, which every step has, is what it is for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """What the demo trains and when it breaks it; steps are optimizer steps."""

    steps: int = DEFAULT_STEPS
    ranks: int = 2
    fault_step: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_whole("fault_step", self.fault_step)
        if self.fault_step < 10:
            raise Invalid("fault_step", self.fault_step, "must leave 10 healthy steps before it")
        if self.steps < self.fault_step + 60:
            raise Invalid("steps", self.steps, f"must be at least fault_step + 60 = {self.fault_step + 60}")

    def train_arguments(self, run: str, collector: str, *, every: int) -> list[str]:
        """The command line of `fp8scope train`, measured in detail every `every` steps."""
        return ["train", "--run", run, "--preset", "demo", "--steps", str(self.steps),
                "--ranks", str(self.ranks), "--seed", str(self.seed),
                "--every", str(every), "--detail-every", "1", "--budget", "none",
                "--collector", collector, "--remote-control",
                "--drill", "frozen-amax", "--fault-step", str(self.fault_step), "--json"]


def rescue_rule() -> Rule:
    """Send a layer to BF16 when its activations no longer fit, take it back when they do again.

    Limits: saturation 1e-3, distortion 5e-3 and GEMM error 0.08 under delayed scaling; each is far above
    what a healthy E4M3 tensor reads (0, 3.5e-4, 0.04).
    """
    def beyond(metric: str, threshold: float) -> Condition:
        return Condition(metric=metric, role="activation", threshold=threshold, k=2, n=3)

    def calm(metric: str, threshold: float) -> Condition:
        return Condition(metric=metric, role="activation", threshold=threshold, beyond="below", k=5, n=5)

    return Rule(
        name="rescue",
        modules="**",
        enter=Clause(conditions=(beyond("saturation_ratio", 1e-3), beyond("distortion", 5e-3),
                                 beyond("gemm_error", 0.08)), combine="any"),
        leave=Clause(conditions=(calm("saturation_ratio", 1e-4), calm("distortion", 1e-3),
                                 calm("gemm_error", 0.06))),
        dwell_steps=10,
        cooldown_steps=20,
    )


def train(found: Services, plan: DemoPlan, name: str, *, rule: Rule | None, progress: Progress) -> str:
    """Train to the end with a progress bar; returns the run's id at the collector."""
    log = data_home() / "logs" / f"{name}.log"
    every = 1 if rule is not None else CONTROL_EVERY
    bar = progress.add_task(name, total=plan.steps)
    with found.client() as client, Child(name, "fp8scope.cli", log=log,
                                         arguments=plan.train_arguments(name, found.collector, every=every),
                                         environment={"OMP_NUM_THREADS": "1"}) as child:
        reader = Reader(client, found.children)
        known = {one.id for one in reader.get("/runs", list[RunDocument])}
        run = _new_run(reader, child, name, known)
        if rule is not None:
            reader.put(f"/runs/{run}/rules/{rule.name}", rule)
        while child.running:
            last = reader.get(f"/runs/{run}", RunDocument).last_step
            progress.update(bar, completed=0 if last is None else last + 1)
            time.sleep(0.5)
        if child.process.returncode != 0:
            raise Fp8scopeError(f"training ended with code {child.process.returncode}; {log} ends with:\n"
                                + child.last_lines())
        progress.update(bar, completed=plan.steps)
    return run


def _new_run(reader: Reader, child: Child, name: str, known: set[str]) -> str:
    while child.running:
        for one in reader.get("/runs", list[RunDocument]):
            if one.name == name and one.id not in known:
                return one.id
        time.sleep(0.2)
    raise Fp8scopeError(f"training ended before it reached the collector; {child.log} ends with:\n"
                        + child.last_lines())


def perform(plan: DemoPlan, found: Services, *, console: Console, json: bool) -> list[str]:
    """Both runs and their story; returns what did not happen as it should."""
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        run = train(found, plan, "demo", rule=rescue_rule(), progress=progress)
        control = train(found, plan, "demo-without-rule", rule=None, progress=progress)
    with found.client() as client:
        reader = Reader(client, found.children)
        story = read_story(reader, run=run, control=control, fault_step=plan.fault_step)
    console.print(story.as_table())
    missing = story.shortfalls(ranks=plan.ranks)
    for line in missing:
        console.print(f"NOT AS IT SHOULD BE: {line}")
    if json:
        print(story.as_json(), flush=True)
    return missing


def _parser() -> Parser:
    parser = Parser(prog="fp8scope demo", description=__doc__)
    parser.add_argument("--no-serve", action="store_true",
                        help="end after the story; exit code 0 only if all of it happened")
    parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"per run ({DEFAULT_STEPS})")
    add_ports(parser)
    return parser


def main(argv: list[str]) -> int:
    """Entry of `fp8scope demo`."""
    options = _parser().parse_args(argv)
    plan = DemoPlan(steps=options.steps)
    console = Console(stderr=True)
    raise_on_terminate()
    with services(**ports(options)) as found:
        login = found.login(with_token=console.is_terminal)
        console.print(f"dashboard  {login}\ncollector  {found.collector}", soft_wrap=True)
        missing = perform(plan, found, console=console, json=options.json)
        if options.no_serve:
            return 1 if missing else 0
        console.print(f"the dashboard stays at {login}\nCtrl-C ends everything", soft_wrap=True)
        wait_for_interrupt(found.children)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
