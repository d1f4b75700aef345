"""The diagnosis of a saved profile on a cluster: where a step would spend its time there, as predicted."""

from __future__ import annotations

from dataclasses import replace

from tacit.algorithms import parse
from tacit.algorithms.auto import candidates
from tacit.planning.candidates import fitting_texts
from tacit.planning.cluster_prediction import computing, predict
from tacit.planning.culprits import diagnosed
from tacit.planning.diagnosis import Diagnosis, Facts, RankSteps
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.networks import strategy_on
from tacit.planning.simulation.rehearsal import rehearse
from tacit.planning.step_prediction import StepPredictor
from tacit.planning.what_if import changes
from tacit.strategy import AnyStrategy
from tacit_lab.cluster_plans import without_rate

_NOTE = (
    "these steps, which a profile of a {} predicts; so nothing is known of slow ranks, interfaces and lost "
    "packets"
)


def diagnosis_of(profile: Profile, network: Network, strategy: AnyStrategy) -> Diagnosis:
    """Diagnose the steps that are predicted for this cluster.

    Raises:
        ConfigError: the strategy cannot be predicted, or the profile does not have its cost.
    """
    present = predict(strategy, profile, network)
    waits = present.far + present.near + present.encoding
    step, gpu = profile.step, profile.gpu
    here = RankSteps(
        rank=0,
        node=0,
        host="as profiled",
        machine="",
        wall=(present.seconds,),
        data=(step.data,),
        exposed=(waits,),
        parts={
            "loading": step.loading,
            "data": step.data - step.loading,
            "forward": step.forward,
            "backward": step.backward,
            "optimizer": step.optimizer,
        },
        threads=profile.threads,
        cores=profile.cores,
        gpu="" if gpu is None else gpu.name,
        launching=0.0 if gpu is None else gpu.launching.forward,
        passes=step.passes,
    )
    facts = Facts(
        algorithm=strategy.name,
        period=1,
        ranks=tuple(replace(here, rank=i, machine=str(i)) for i in range(network.world)),
        buckets=len(
            rehearse(strategy_on(network, strategy), profile, network.nodes, network.ranks)[-1].buckets
        ),
        bucket_bytes=profile.bucket_bytes,
        predicted=present.seconds,
        waits={"encoding": present.encoding, "links": present.far + present.near},
        gpu=gpu,
        alone=computing(profile, network),
    )
    predictor = StepPredictor(profile, network)
    facts = replace(facts, changes=changes(predictor, strategy, facts, by_ddp=True))
    texts, _ = fitting_texts(candidates("feedback"), profile, asked=False)
    others = [parse(text) for text in texts if text != strategy.name]
    found = predictor.predict_all(others, present.seconds)
    best = min(found, key=lambda each: each.seconds, default=None)
    if best is not None:
        facts = replace(facts, best=best.algorithm, changes={**facts.changes, "strategy": best.seconds})
    of = f"{profile.kind} with {profile.stepped_by or 'an optimizer that is not known'}"
    return diagnosed(facts, [*filter(None, (_NOTE.format(of), without_rate(network)))])
