"""verl's own example scripts, of two revisions, alone and with +clipx=grpo and +clipx=acpo: each has its outcome
written down beside verl 0.9.1 and beside verl's main (with `-m matrix` all by Hydra, beside the verl that is here), and
docs/support.md counts the refusals. Not covered: training.
"""

import pytest

from .configuration import ACTOR
from .documents import ROOT
from .verl_examples.examples import GROUPS, MAIN, RELEASE, examples, outcomes, outcomes_here, outcomes_of

EXAMPLES_OF_MAIN = [example for example in examples() if MAIN in example.revisions]
# The examples that compose alone beside each verl: beside its main, of its own.
COMPOSING = {
    verl: [example for example in candidates if "alone" not in outcomes(verl)[example.name]]
    for verl, candidates in ((RELEASE, examples()), (MAIN, EXAMPLES_OF_MAIN))
}
# An example of each kind of outcome, which is in every run.
ALWAYS_TESTED = {tuple(outcomes()[example.name].values()): example.name for example in COMPOSING[RELEASE]}.values()

# Why a script is refused under +clipx=acpo, by the script's own setting that is the reason.
REASONS = {
    f"{ACTOR}.policy_loss.loss_mode": "asks for another loss",
    "distillation.distillation_loss.use_task_rewards": "distillation alone, without a policy loss",
    "algorithm.rollout_correction.rollout_is": "weights in bypass mode, which would correct twice",
}


def test_every_command_line_has_an_outcome_and_at_least_55_of_a_revision_compose_alone():
    assert [example.name for example in examples()] == list(outcomes())
    for revision in ("v0.9.0", MAIN):
        assert sum(revision in example.revisions for example in COMPOSING[RELEASE]) >= 55


def test_only_what_verl_s_main_composes_and_0_9_1_does_not_comes_out_differently():
    differing = [name for name in outcomes() if outcomes()[name] != outcomes(MAIN)[name]]
    assert differing and list(outcomes()) == list(outcomes(MAIN))
    for name in differing:
        assert outcomes()[name] == {"alone": "Could not override 'actor_rollout_ref.actor.megatron.grad_offload'."}
        assert outcomes(MAIN)[name].keys() == set(GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=example.name, marks=[] if example.name in ALWAYS_TESTED else pytest.mark.matrix)
        for example in examples()
    ],
)
def test_hydra_gives_what_is_written_down(example):
    assert outcomes_of(example) == outcomes_here()[example.name]


def reason_of(settings):
    """The first key of REASONS for which a script's own settings are refused, or None."""
    bypass = "algorithm.rollout_correction.bypass_mode" in settings
    for key in REASONS:
        if key in settings and (bypass or not key.endswith("rollout_is")):
            return key
    return None


def counts_of(verl):
    """Returns how many of the scripts that a verl composes are refused for each of `REASONS`, each by what it says."""
    counts = dict.fromkeys(REASONS, 0)
    for example in COMPOSING[verl]:
        # By what the script says, without the plugin.
        settings = dict(word.split("=", 1) for word in example.arguments if "=" in word)
        reason = reason_of(settings)
        clip_ratio_high = settings.get(f"{ACTOR}.clip_ratio_high", "0.2")
        for group in GROUPS:
            outcome = outcomes(verl)[example.name][group]
            if reason:
                assert outcome.startswith(f"refused: {reason.removeprefix(f'{ACTOR}.')}")
            else:
                assert "refused" not in outcome
                bound = "clip_high=1.28" if group == "grpo" else "not used: clip_ratio_high"
                assert clip_ratio_high == "0.2" or bound in outcome
        if reason:
            counts[reason] += 1
    return counts


def test_no_script_keeps_another_loss_or_loses_a_bound_and_the_page_counts_every_refusal():
    counts = counts_of(RELEASE)
    refused = sum(counts.values())
    number = len(COMPOSING[RELEASE])
    counts_on_main = counts_of(MAIN)
    refused_on_main = sum(counts_on_main.values())
    number_on_main = len(COMPOSING[MAIN])
    fewer = number_on_main - sum(example in COMPOSING[RELEASE] for example in EXAMPLES_OF_MAIN)
    reasons_on_main = (f"{count} for `{key.rpartition('.')[2]}`" for key, count in counts_on_main.items())
    lines = [
        f"verl 0.9.1 composes the configuration of {number} of them. The plugin accepts {number - refused} of these "
        "under `+clipx=acpo`; none was",
        f"launched. It refuses the other {refused}:",
        "",
        *(f"- `{key.rpartition('.')[2]}` ({reason}), {counts[key]}" for key, reason in REASONS.items()),
        "",
        f"verl's main composes {number_on_main} of its own {len(EXAMPLES_OF_MAIN)}; 0.9.1 composes {fewer} fewer of "
        "these, because only main has",
        f"`actor.megatron.grad_offload`. The plugin accepts {number_on_main - refused_on_main} of the {number_on_main} "
        f"under `+clipx=acpo`. It refuses the other {refused_on_main} for the same",
        f"reasons: {', '.join(reasons_on_main)}.",
    ]
    page = (ROOT / "docs" / "support.md").read_text()
    assert page.split("<!-- verl's examples -->\n")[1].split("\n<!-- end -->")[0] == "\n".join(lines), lines
