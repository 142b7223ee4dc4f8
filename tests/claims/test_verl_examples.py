"""verl's own example scripts, of two revisions, alone and with +clipx=grpo and +clipx=acpo: each has its outcome
written down (with `-m matrix` all by Hydra), and docs/support.md counts the refusals. Not covered: training.
"""

import pytest

from .configuration import ACTOR
from .documents import ROOT
from .verl_examples.examples import GROUPS, examples, outcomes, outcomes_of

COMPOSING = [example for example in examples() if "alone" not in outcomes()[example.name]]
# Of each kind of outcome one.
CHOSEN = {tuple(outcomes()[example.name].values()): example.name for example in COMPOSING}.values()

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
@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name, marks=[pytest.mark.matrix] * (one.name not in CHOSEN)) for one in examples()],
)
def test_hydra_gives_what_is_written_down(example):
    assert outcomes_of(example) == outcomes()[example.name]


def reason_of(said):
    """The first key of REASONS for which a script's own settings are refused, or None."""
    bypass = "algorithm.rollout_correction.bypass_mode" in said
    return next((key for key in REASONS if key in said and (bypass or not key.endswith("rollout_is"))), None)


def test_no_script_keeps_another_loss_or_loses_a_bound_and_the_page_counts_every_refusal():
    counts = dict.fromkeys(REASONS, 0)
    for example in COMPOSING:
        # By what the script says, without the plugin.
        said = dict(word.split("=", 1) for word in example.arguments if "=" in word)
        reason, wider = reason_of(said), said.get(f"{ACTOR}.clip_ratio_high", "0.2")
        for group in GROUPS:
            outcome = outcomes()[example.name][group]
            if reason:
                assert outcome.startswith(f"refused: {reason.removeprefix(f'{ACTOR}.')}")
            else:
                assert "refused" not in outcome
                bound = "clip_high=1.28" if group == "grpo" else "not used: clip_ratio_high"
                assert wider == "0.2" or bound in outcome
        if reason:
            counts[reason] += 1
    refused = sum(counts.values())
    lines = [
        f"Of the {len(COMPOSING)} that verl 0.9.1 composes, {len(COMPOSING) - refused} run under `+clipx=acpo`. "
        f"The other {refused}:",
        "",
        *(f"- `{key.rpartition('.')[2]}` ({reason}), {counts[key]}" for key, reason in REASONS.items()),
    ]
    page = (ROOT / "docs" / "support.md").read_text()
    assert page.split("<!-- verl's examples -->\n")[1].split("\n<!-- end -->")[0] == "\n".join(lines), lines
