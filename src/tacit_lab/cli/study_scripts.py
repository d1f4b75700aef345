"""The user's own script as what a study trains: run by run, on an emulated cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tacit.algorithms import parse
from tacit.errors import ConfigError, TestbedError
from tacit.files import spared
from tacit_lab.cli.compare.recorder import append_line
from tacit_lab.cli.compare.scripts import Said, ScriptRun, run_script
from tacit_lab.cli.run.options import RunOptions
from tacit_lab.cluster import Cluster
from tacit_lab.records import EndRecord, Environment, RunKey
from tacit_lab.study.carrying_out import outcome, told
from tacit_lab.study.jobs import Ended, StudyRun, append, written
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
                done[run] = ended = self._train(bed, run)
                with spared(f"{path.name} is not whole"):
                    append(path, ended)
                tell(outcome(ended))
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
        loss = end.loss if end.loss is not None else 0.0
        return Ended(
            run,
            accuracy=-loss if end.accuracy is None else end.accuracy,
            validation=-loss if end.validation is None else end.validation,
            loss=loss,
            share=1.0,
            seconds=end.seconds or 0.0,
            hardware=asdict(Environment.here()),
            megabytes=end.mb_between_nodes,
            by_loss=end.accuracy is None,
            on_cluster=True,
        )
