"""The loop itself, around a trainer and a fleet that are stand-ins."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.fleet.client import EngineError
from tests.support.policies import recipe
from tests.support.ranks import run_on_ranks


class Publishing:
    """The ``Publisher`` of a fleet that takes nothing until it has come back so many times."""

    scheme, timeline = "none", None

    def __init__(self, refusals: int) -> None:
        self.refusals, self.versions = refusals, []

    def publish(self, version: int) -> dict:
        self.refusals -= 1
        if self.refusals >= 0:
            raise EngineError("engine-0 has died")
        self.versions.append(version)
        return {}


def start(device, config, refusals: int, why: str) -> None:
    from qurl_megatron.training.loop import Run
    from qurl_megatron.training.state import TrainState

    with megatron_runtime(config.parallel) as ranks:
        publishing, said = Publishing(refusals), []
        lead = SimpleNamespace(
            recover=lambda: said.append("recovered"),
            published=lambda version: said.append(f"published {version}"),
            drain_events=lambda step: said.append(f"happened by {step}"),
        )
        run = Run(
            config=config,
            policy=SimpleNamespace(ranks=ranks),
            critic=None,
            publisher=publishing,
            lead=lead if ranks.leads else None,
            state=TrainState(step=7),
            saved=7,
        )
        if why:
            with pytest.raises(EngineError, match=why):
                run.to_the_end()
            assert not ranks.leads or said == [*["recovered"] * 2, "happened by 7"]
        else:
            run.to_the_end()
            assert publishing.versions == [7]
            assert not ranks.leads or said == ["recovered", "published 7", "happened by 7"]


@pytest.mark.parametrize(
    ("refusals", "why"), [(1, ""), (9, "engine-0 has died; step 7 is saved, start again")]
)
def test_the_first_version_waits_for_engines_as_every_other_does(refusals, why, backend, tmp_path):
    config = recipe(tmp_path, dict(data=2))
    config = replace(config, train=replace(config.train, steps=7, eval_prompts=0))
    run_on_ranks(start, 2, backend, tmp_path, config, refusals, why)
