"""The user's own script as what a study trains: run by run, on an emulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tacit.algorithms import parse
from tacit.errors import ConfigError, TestbedError
from tacit_lab.cli.compare.recorder import append_line
from tacit_lab.cli.compare.scripts import Said, ScriptRun, run_script
from tacit_lab.cli.run.options import RunOptions
from tacit_lab.cluster import Cluster
from tacit_lab.records import EndRecord, Environment, RunKey
from tacit_lab.study.carrying_out import take, told
from tacit_lab.study.jobs import Ended, StudyRun, written
from tacit_lab.testbed import Testbed


@dataclass(frozen=True)
class StudiedScript:
    """A script, and where it is trained.

    Attributes:
        script: the script and its arguments, or `-m`, a module and its arguments.
        timeout: seconds that one training may take.
        folder: for what the ranks print, and for tracebacks.
    """

    script: tuple[str, ...]
    cluster: Cluster
    timeout: float
    folder: Path

    def carry_out(
        self,
        missing: Callable[[Mapping[StudyRun, Ended]], Iterable[StudyRun]],
        done: dict[StudyRun, Ended],
        path: Path,
        tell: Callable[[str], None],
    ) -> dict[StudyRun, Ended]:
        """Train what is missing, one after the other, in one testbed; each is added to the file.

        Raises:
            TestbedError: the script failed, or the cluster cannot be emulated.
            ConfigError: it reports nothing, or does not ask for seed and steps.
        """
        with Testbed(self.cluster) as bed:
            while (run := next(iter(missing(done)), None)) is not None:
                take(self._train(bed, run), done, path, tell)
        return done

    def _train(self, bed: Testbed, run: StudyRun) -> Ended:
        strategy = parse(written(run.arm, run.steps))
        heard = ScriptRun(self.script, self.cluster, RunKey(run.arm, run.seed, run.rate), None)

        def handle(node: int, line: str) -> None:
            said = Said.of(node, line)
            if said is None:
                append_line(self.folder / "output.log", f"[{told(run)}, node {node}] {line}")
            else:
                heard.heard(said, run.arm, run.steps)

        options = RunOptions(
            script=self.script,
            cluster=self.cluster,
            strategy=strategy,
            timeout=self.timeout,
            folder=self.folder,
        )
        asked = {"seed": run.seed, "rate": run.rate, "steps": run.steps}
        result, timelines = run_script(bed, options, asked, handle)
        if result.error is not None:
            raise TestbedError("\n".join([f"{told(run)} failed: {result.error}", *result.why()]))
        heard.check("--steps")
        end = next(each for each in heard.records(result, "", timelines) if isinstance(each, EndRecord))
        if end.steps != run.steps:
            raise ConfigError(
                f"{told(run)}: the last report was of step {end.steps}: train for tacit.trial().steps, and "
                "report after the last one"
            )
        return replace(Ended.of(run, end), hardware=asdict(Environment.here()))
