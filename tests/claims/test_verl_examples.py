"""verl's own example scripts with +clipx=grpo and +clipx=acpo: each has its outcome written down.

Covers: the command lines of every script that starts verl's main, of two revisions of verl (overrides.json says which):
the bounds that the driver decides on and the keys that are not used, or the keys that it refuses; the list of refusals
in docs/support.md. The keys that the plugin reads are put onto verl's configuration; some scripts are composed by Hydra
as a whole. Not covered: all by Hydra, and which of them verl 0.9.1 composes (tests/end_to_end/test_verl_examples.py);
training.
"""

import pytest

from .configuration import ACTOR
from .documents import ROOT
from .verl_examples.examples import GROUPS, by_hydra, by_merging, examples, outcomes

COMPOSING = [example for example in examples() if "alone" not in outcomes()[example.name]]
# Of each kind of outcome one.
BY_HYDRA = list({tuple(outcomes()[example.name].values()): example for example in COMPOSING}.values())

# Why a script is refused under +clipx=acpo, by the script's own setting that is the reason.
REASONS = {
    f"{ACTOR}.policy_loss.loss_mode": "asks for another loss",
    "distillation.distillation_loss.use_task_rewards": "distillation alone, without a policy loss",
    "algorithm.rollout_correction.rollout_is": "weights in bypass mode, which would correct twice",
}


def test_every_command_line_has_an_outcome_and_at_least_55_of_a_revision_compose_alone():
    assert [example.name for example in examples()] == list(outcomes())
    for revision in ("v0.9.0", "main"):
        assert sum(revision in example.revisions for example in COMPOSING) >= 55


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_its_bounds_or_the_refused_keys_are_as_written_down(group):
    merged = {example.name: by_merging(example, group) for example in COMPOSING}
    assert merged == {name: outcomes()[name][group] for name in merged}


@pytest.mark.slow
@pytest.mark.parametrize("example", BY_HYDRA, ids=lambda example: example.name)
def test_hydra_gives_what_putting_the_keys_together_gives(example):
    assert {group: by_hydra(example, group) for group in GROUPS} == outcomes()[example.name]


def settings(example):
    """What a script itself says."""
    return dict(word.split("=", 1) for word in example.arguments if "=" in word)


def test_no_script_keeps_another_loss_or_loses_a_bound():
    # By what the script says, without the plugin.
    for example in COMPOSING:
        said = settings(example)
        reasons = [key.removeprefix(f"{ACTOR}.") for key in REASONS if is_reason(key, said)]
        wider = said.get(f"{ACTOR}.clip_ratio_high", "0.2")
        for group in GROUPS:
            outcome = outcomes()[example.name][group]
            assert outcome.startswith(f"refused: {reasons[0]}") if reasons else "refused" not in outcome
            if not reasons and wider != "0.2":
                assert ("clip_high=1.28" if group == "grpo" else "not used: clip_ratio_high") in outcome


def is_reason(key, said):
    """Whether a script's settings under a key of `REASONS` are why it is refused."""
    if key.endswith("rollout_is"):
        return "algorithm.rollout_correction.bypass_mode" in said and key in said
    return key in said


def test_the_page_counts_every_refusal_by_its_reason():
    refused = [example for example in COMPOSING if outcomes()[example.name]["acpo"].startswith("refused")]
    lines = [
        f"Of the {len(COMPOSING)} that verl 0.9.1 composes, {len(COMPOSING) - len(refused)} run under `+clipx=acpo`. "
        f"The other {len(refused)}:",
        "",
    ]
    for key, reason in REASONS.items():
        of_key = [example for example in refused if is_reason(key, settings(example))]
        lines.append(f"- `{key.rpartition('.')[2]}` ({reason}), {len(of_key)}")
    text = "\n".join(lines)
    page = (ROOT / "docs" / "support.md").read_text()
    assert page.split("<!-- verl's examples -->\n")[1].split("\n<!-- end -->")[0] == text, text
