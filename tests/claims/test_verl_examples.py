"""verl's own example scripts with +clipx=grpo and +clipx=acpo: each has its outcome written down.

Covers: the command lines of every script that starts verl's main, of two revisions of verl (overrides.json says which):
the bounds that the driver decides on, or the keys that it refuses. The keys that the plugin reads are put onto verl's
configuration; some scripts are composed by Hydra as a whole. Not covered: all by Hydra, and which of them verl 0.9.1
composes (tests/end_to_end/test_verl_examples.py); training.
"""

import pytest

from .verl_examples.examples import GROUPS, by_hydra, by_merging, examples, outcomes

COMPOSING = [example for example in examples() if "alone" not in outcomes()[example.name]]
# Of each kind of outcome one.
BY_HYDRA = list({tuple(outcomes()[example.name].values()): example for example in COMPOSING}.values())


def test_every_command_line_has_an_outcome_and_at_least_55_of_a_revision_compose_alone():
    assert [example.name for example in examples()] == list(outcomes())
    for revision in ("v0.9.0", "main"):
        assert sum(revision in example.revisions for example in COMPOSING) >= 55


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_its_bounds_or_the_refused_keys_are_as_written_down(group):
    found = {example.name: by_merging(example, group) for example in COMPOSING}
    assert found == {name: outcomes()[name][group] for name in found}


@pytest.mark.slow
@pytest.mark.parametrize("example", BY_HYDRA, ids=lambda example: example.name)
def test_hydra_gives_what_putting_the_keys_together_gives(example):
    assert {group: by_hydra(example, group) for group in GROUPS} == outcomes()[example.name]


def test_no_script_keeps_another_loss_or_loses_a_bound():
    # By what the script says, without the plugin: (its name for) another loss, a width that is not verl's default,
    # weights that bypass mode would leave out, or a distillation loss in the place of the policy loss.
    refusing = {
        "algorithm.rollout_correction.bypass_mode": "algorithm.rollout_correction.rollout_is",
        "distillation.enabled": "distillation.distillation_loss.use_task_rewards",
    }
    for example in COMPOSING:
        said = dict(word.split("=", 1) for word in example.arguments if "=" in word)
        for group in GROUPS:
            outcome = outcomes()[example.name][group]
            if "actor_rollout_ref.actor.policy_loss.loss_mode" in said:
                assert outcome.startswith("refused: policy_loss.loss_mode")
            elif said.get("actor_rollout_ref.actor.clip_ratio_high", "0.2") != "0.2":
                assert (said["actor_rollout_ref.actor.clip_ratio_high"], outcome) in {
                    ("0.28", "clip_low=0.8, clip_high=1.28, dual_clip=10"),
                    ("0.28", "refused: clip_ratio_high"),
                }
            elif keys := [key for switch, key in refusing.items() if switch in said]:
                assert outcome == f"refused: {', '.join(keys)}"
            else:
                assert "refused" not in outcome
