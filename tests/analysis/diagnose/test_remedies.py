"""What a finding advises, by the run's own configuration and log: a key that it must name, with the run's value, and
what it must not advise, since that is set already or can't help. Not covered: when a rule is met (test_rules.py); what
the advice is worth; clipping that rounding explains (test_rounding.py).
"""

import pytest

from tests.analysis.diagnose.example_settings import ACTOR, ONE_UPDATE, ROLLOUT, make_run
from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.diagnosis import diagnose
from verl_clipx.analysis.diagnose.remedies import takes_ratio_to_sampler
from verl_clipx.analysis.runs import keys
from verl_clipx.losses.methods import BUILT_IN, METHODS

LOWEST_SCORE = "critic/score/min"
HIGHEST_SCORE = "critic/score/max"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"

ENTROPY_COLLAPSES = {keys.ENTROPY: [1.0] * 9 + [0.01] * 9}
ENTROPY_EXPLODES = {keys.ENTROPY: [0.3] * 9 + [13.0] * 9}
REWARD_COLLAPSES = {keys.REWARD: [0.5] * 9 + [0] * 9}
STEADY_REWARD = {keys.REWARD: [0.5] * 5}
PROMPTS_ALIKE = {keys.ALIKE: [0.9] * 5}
PROMPTS_ALIKE_OF_MIXED_SCORES = PROMPTS_ALIKE | {LOWEST_SCORE: [0.0] * 5, HIGHEST_SCORE: [1.0] * 5}
RESPONSES_CUT = {keys.CUT: [0.5] * 5}
ONLY_LOW_CLIPS = {keys.CLIPPED_LOW: [0.05] * 9, keys.CLIPPED_HIGH: [0.0] * 9}
RATIO_STAYS_1 = {keys.RATIO: [1.0] * 5, keys.KL: [0.0] * 5}
RATIO_LEAVES_1 = {keys.RATIO: [1.0] * 4 + [1.05] * 5, keys.KL: [0.0] * 9}
FIVE_TOKENS_A_BIN = {f"actor/clipx/count/bin_{index}": [5.0] * 5 for index in range(3)}
PROMPTS_DROPPED = {keys.EVICTED: [2.0] * 5}
SMALL_WEIGHTS = {keys.WEIGHTS_MEAN: [0.06] * 5}
SAMPLER_DRIFTS = {keys.SAMPLER_KL: [0.001] * 4 + [0.05] * 5, keys.PG_CLIPPED: [0.0] * 9}
UPDATE_SKIPPED = {keys.SKIPPED_UPDATES: [0, 1]}


@pytest.mark.parametrize(
    ("log", "configuration", "facts", "not_named"),
    [
        # Against a collapse of entropy: first what lowers it by itself, then wider bounds by the run's own keys, then
        # the learning rate.
        pytest.param(
            ENTROPY_COLLAPSES,
            {},
            ["Raise actor.clip_ratio_high to 0.28", "ratio of 1.28"],
            "acpo",
            id="entropy, verl's default bounds",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.clip_ratio_high": 0.2},
            ["Raise actor.clip_ratio_high", "here 0.2", "to 0.28"],
            "acpo",
            id="entropy, an upper bound below DAPO's",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.clip_ratio": 0.28},
            ["set actor.clip_ratio_high to 1", "ratio of 2", "actor.clip_ratio_low to 0.5"],
            "+clipx",
            id="entropy, DAPO's bound on both sides",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.clip_ratio_low": 0.2},
            ["here 0.28", "to 1", "ratio of 2", "actor.clip_ratio_low (here 0.2) to 0.5", "one toy task"],
            "+clipx",
            id="entropy, DAPO's upper bound",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.clip_ratio_high": 0.3, f"{ACTOR}.clip_ratio_low": 0.5},
            ["ratio of 2"],
            "ratio_low",
            id="entropy, a wide lower bound",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.clip_ratio_high": 1.0, f"{ACTOR}.optim.lr": 1e-5},
            ["Lower actor.optim.lr (here 1e-05)"],
            "set",
            id="entropy, a wide upper bound",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {"clipx.method": "grpo", "clipx.clip_high": 1.2},
            ["Raise clipx.clip_high (here 1.2) to 1.28"],
            "ratio_",
            id="entropy, clipx.clip_high",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {"clipx.method": "grpo", "clipx.clip_high": None},
            ["Lower actor.optim.lr"],
            "Raise",
            id="entropy, no upper bound",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {"clipx.method": "gspo", "clipx.clip_high": 1.0004},
            ["Lower actor.optim.lr"],
            "Raise",
            id="entropy, bounds on the ratio of a sequence",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {"clipx.method": "bapo"},
            ["Lower actor.optim.lr"],
            "Raise",
            id="entropy, adaptive bounds",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
            ["Lower actor.optim.lr"],
            "Raise",
            id="entropy, verl's gspo",
        ),
        pytest.param(
            ENTROPY_COLLAPSES,
            {f"{ACTOR}.entropy_coeff": -0.1},
            ["Set actor.entropy_coeff (here -0.1) to 0"],
            "Raise",
            id="entropy, a negative coefficient",
        ),
        pytest.param(
            ENTROPY_EXPLODES,
            {f"{ACTOR}.entropy_coeff": 0.01},
            ["lower actor.entropy_coeff (here 0.01)"],
            "optim",
            id="entropy explodes, a positive coefficient",
        ),
        pytest.param(
            ENTROPY_EXPLODES,
            {f"{ACTOR}.entropy_coeff": 0},
            ["lower actor.optim.lr"],
            "coeff",
            id="entropy explodes, no coefficient",
        ),
        pytest.param(
            PROMPTS_ALIKE_OF_MIXED_SCORES | {keys.REWARD: [0.54] * 5},
            {},
            ["solved sometimes"],
            "harder",
            id="alike, half of the samples solved",
        ),
        pytest.param(
            PROMPTS_ALIKE_OF_MIXED_SCORES | {keys.REWARD: [0.8] * 5},
            {},
            ["0.8 in the last step", "0 to 1 in all steps", "harder prompts"],
            "easier",
            id="alike, most samples solved",
        ),
        pytest.param(
            PROMPTS_ALIKE_OF_MIXED_SCORES | {keys.REWARD: [0.1] * 5},
            {},
            ["easier prompts"],
            "harder",
            id="alike, few samples solved",
        ),
        pytest.param(
            PROMPTS_ALIKE,
            {},
            ["prompts whose samples score differently"],
            "solved",
            id="alike, no scores",
        ),
        pytest.param(
            PROMPTS_ALIKE,
            {f"{ROLLOUT}.n": 1},
            ["raise rollout.n (here 1)"],
            "prompts whose",
            id="alike, one sample a prompt",
        ),
        pytest.param(
            PROMPTS_ALIKE,
            {f"{ROLLOUT}.n": 8, f"{ROLLOUT}.temperature": 0},
            ["rollout.temperature (here 0)"],
            "prompts whose",
            id="alike, sampled greedily",
        ),
        pytest.param(
            RESPONSES_CUT,
            {"data.max_response_length": 512},
            ["Raise data.max_response_length (here 512)"],
            "None",
            id="cut at the limit",
        ),
        pytest.param(
            REWARD_COLLAPSES,
            {f"{ACTOR}.optim.lr": 1e-5},
            ["lower actor.optim.lr (here 1e-05)"],
            "512",
            id="reward collapses",
        ),
        pytest.param(
            REWARD_COLLAPSES,
            {"trainer.save_freq": -1},
            ["Run again", "lower actor.optim.lr"],
            "Go back",
            id="reward collapses, no checkpoints",
        ),
        pytest.param(
            REWARD_COLLAPSES,
            {"trainer.save_freq": 20},
            ["Go back to a checkpoint"],
            "Run again",
            id="reward collapses, checkpoints",
        ),
        pytest.param(
            ONLY_LOW_CLIPS,
            {"clipx.clip_low": 0.9, "clipx.clip_high": 1.1},
            ["Widen", "clipx.clip_low (here 0.9)"],
            "clip_high",
            id="one side clips",
        ),
        pytest.param(
            ONLY_LOW_CLIPS,
            {"clipx.method": "grpo", "clipx.clip_low": 0.8, "clipx.clip_high": None},
            ["Set clipx.clip_high"],
            "Widen",
            id="one side clips, the other has no bound",
        ),
        pytest.param(
            ONLY_LOW_CLIPS,
            {"clipx.method": "acpo", "clipx.alpha": 3.0},
            ["clipx replay"],
            "Widen",
            id="one side clips, adaptive bounds",
        ),
        pytest.param(
            RATIO_STAYS_1,
            ONE_UPDATE,
            ["actor.ppo_mini_batch_size (here 8)", "smaller"],
            "epo",
            id="one update of many prompts",
        ),
        pytest.param(
            RATIO_STAYS_1,
            ONE_UPDATE | {"data.train_batch_size": 1, f"{ACTOR}.ppo_mini_batch_size": 1},
            ["Raise actor.ppo_epochs (here 1)"],
            "Make",
            id="one update of one prompt",
        ),
        pytest.param(
            FIVE_TOKENS_A_BIN,
            ONE_UPDATE | {"clipx.alpha": 3.0},
            ["Lower clipx.alpha (here 3.0)"],
            "larger",
            id="few tokens a bin, in one update",
        ),
        pytest.param(
            FIVE_TOKENS_A_BIN,
            ONE_UPDATE | {"clipx.alpha": 3.0, "data.train_batch_size": 64},
            ["actor.ppo_mini_batch_size (here 8) larger"],
            "Low",
            id="few tokens a bin, in several updates",
        ),
        pytest.param(
            FIVE_TOKENS_A_BIN,
            ONE_UPDATE | {"clipx.alpha": 3.0, "clipx.scope": "micro_batch"},
            ["Set clipx.scope to mini_batch"],
            "larger",
            id="few tokens a bin, statistics over micro-batches",
        ),
        pytest.param(
            RATIO_LEAVES_1,
            ONE_UPDATE,
            ["Check whether", BYPASS],
            "off already",
            id="ratio is not 1, bypass mode unknown",
        ),
        pytest.param(
            RATIO_LEAVES_1,
            ONE_UPDATE | {BYPASS: True},
            [f"Set {BYPASS} (here True) to false"],
            "Look",
            id="ratio is not 1, in bypass mode",
        ),
        pytest.param(
            RATIO_LEAVES_1,
            ONE_UPDATE | {BYPASS: False},
            [keys.STALENESS, "bypass_mode is off already"],
            "whether",
            id="ratio is not 1, without bypass mode",
        ),
        pytest.param(
            PROMPTS_DROPPED,
            ONE_UPDATE | {"trainer.v1.sampler.max_off_policy_threshold": 8},
            ["trainer.v1.sampler.max_off_policy_threshold (here 8)", "long answer"],
            "token",
            id="prompts dropped",
        ),
        pytest.param(
            SMALL_WEIGHTS,
            {},
            [f"If {CORRECTION}.rollout_is is sequence", "to token"],
            "differ",
            id="small weights, kind unknown",
        ),
        pytest.param(
            SMALL_WEIGHTS,
            {f"{CORRECTION}.rollout_is": "sequence"},
            [f"Set {CORRECTION}.rollout_is to token"],
            "If",
            id="small weights of sequences",
        ),
        pytest.param(
            SMALL_WEIGHTS,
            {f"{CORRECTION}.rollout_is": "token"},
            ["Find out why", "sampler", "trainer", "differ", keys.MISMATCH],
            "Set",
            id="small weights of tokens",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {},
            [f"If {BYPASS} is off", f"correct for the sampler ({CORRECTION})", "If it is on, narrow the bounds"],
            "already",
            id="sampler drifts, bypass mode unknown",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {BYPASS: False},
            [f"Correct for the sampler ({CORRECTION})", "the clip acts"],
            "is off",
            id="sampler drifts, no correction",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {BYPASS: False, f"{CORRECTION}.rollout_is": "token"},
            ["Give the sampler new weights more often", f"{CORRECTION}.rollout_is is on already"],
            "Correct",
            id="sampler drifts, corrected",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {BYPASS: False, f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_rs": "token_k1"},
            [f"{CORRECTION}.rollout_is and {CORRECTION}.rollout_rs are on already"],
            "Correct",
            id="sampler drifts, corrected in two ways",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {f"{CORRECTION}.rollout_is": "token"},
            [f"If {BYPASS} is off", f"{CORRECTION}.rollout_is is on already", "If it is on, narrow the bounds"],
            "orrect for",
            id="sampler drifts, corrected, bypass mode unknown",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {BYPASS: False, "clipx.method": "m2po"},
            ["Narrow the bounds", "with M2PO the clip acts on the ratio to the sampler's probabilities"],
            "orrect for",
            id="sampler drifts, ratio of the method to the sampler",
        ),
        pytest.param(
            SAMPLER_DRIFTS,
            {BYPASS: False, "clipx.method": "m2po", "clipx.behaviour": "old"},
            [f"Correct for the sampler ({CORRECTION})"],
            "arrow",
            id="sampler drifts, ratio of the method to the old policy",
        ),
        pytest.param(
            SAMPLER_DRIFTS, {BYPASS: True}, ["Narrow the bounds"], "Correct", id="sampler drifts, bypass mode"
        ),
        pytest.param(
            STEADY_REWARD,
            {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": -1},
            ["Sample with top_p 1"],
            "top_k -1",
            id="sampled with top_p",
        ),
        pytest.param(
            STEADY_REWARD,
            {f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": 50},
            ["Sample with top_k -1"],
            "top_p",
            id="sampled with top_k",
        ),
        pytest.param(
            UPDATE_SKIPPED,
            {},
            ["prompts and fields", "run's output"],
            "observe",
            id="skipped update, in a log of this plugin",
        ),
    ],
)
def test_advice_names_what_this_run_can_change_with_its_value(log, configuration, facts, not_named):
    (diagnosis,) = diagnose(make_run(log, configuration))
    assert_names(diagnosis.text, *facts)
    assert not_named not in diagnosis.text


def test_the_methods_with_a_ratio_to_the_sampler_are_known():
    known = [name for name in BUILT_IN if takes_ratio_to_sampler(make_run({}, {"clipx.method": name}, steps=1))]
    assert known == [name for name in BUILT_IN if METHODS[name]().ratio_to_sampler]


NOTHING_LEFT = "nothing is left to learn"
NOTHING_LEARNED = "nothing is learned"
# What float32 leaves of GRPO's advantages where eight samples score 0.9: (0.9 - mean) / (std + 1e-6).
ADVANTAGES_OF_EQUALS = {"critic/advantages/min": -0.056, "critic/advantages/max": 0.056}
ADVANTAGES = {"critic/advantages/min": -0.9, "critic/advantages/max": 1.5}
NO_ADVANTAGES = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
ALL_SCORE_0 = {LOWEST_SCORE: 0.0, HIGHEST_SCORE: 0.0}
ALL_SCORE_1 = {LOWEST_SCORE: 1.0, HIGHEST_SCORE: 1.0}
SCORES_DIFFER = {LOWEST_SCORE: 0.0, HIGHEST_SCORE: 1.0}


@pytest.mark.parametrize(
    ("rows", "onsets", "explanation"),
    [
        pytest.param(
            [NO_ADVANTAGES | ALL_SCORE_0] * 30,
            {"no learning signal": 1},
            NOTHING_LEARNED,
            id="nothing solved",
        ),
        pytest.param(
            [ADVANTAGES | SCORES_DIFFER] * 9 + [NO_ADVANTAGES | ALL_SCORE_1] * 3,
            {"no learning signal": 10},
            NOTHING_LEFT,
            id="everything solved from step 10 on",
        ),
        pytest.param(
            [NO_ADVANTAGES | SCORES_DIFFER] * 5,
            {"no learning signal": 1},
            None,
            id="scores differ between prompts alone",
        ),
        pytest.param(
            [ADVANTAGES_OF_EQUALS | ALL_SCORE_1] * 5,
            {"no learning signal": 1},
            NOTHING_LEFT,
            id="advantages of equal scores, rounded",
        ),
        pytest.param([ADVANTAGES_OF_EQUALS] * 5, {}, None, id="small advantages of unknown scores"),
        pytest.param([NO_ADVANTAGES, NO_ADVANTAGES, ADVANTAGES] * 9, {}, None, id="not in three steps in a row"),
        pytest.param(
            [{keys.ALIKE: 1.0}] * 5,
            {"no learning signal": 1, "few prompts teach, because samples score alike": 1},
            None,
            id="all prompts alike",
        ),
    ],
)
def test_a_lack_of_signal_is_explained_by_the_scores(tmp_path, rows, onsets, explanation):
    write_log(tmp_path / "run/metrics.jsonl", rows)
    findings = answer("diagnose", tmp_path / "run")["findings"]
    assert {finding["finding"]: finding["onset"] for finding in findings} == onsets
    output = clipx("diagnose", tmp_path / "run")
    assert (NOTHING_LEFT in output) == (explanation == NOTHING_LEFT)
    assert (NOTHING_LEARNED in output) == (explanation == NOTHING_LEARNED)
    if explanation == NOTHING_LEFT:
        assert_names(output, "score 1", "the most in this log", "harder prompts")
    if explanation == NOTHING_LEARNED:
        assert_names(output, "score 0", "reward function")


# Those of four steps.
SMALL_MISMATCHES = [2e-7, 5e-7, 3e-7, 4e-7]
KL = "rollout_corr/kl"
OTHER_PRECISION = "another precision, temperature or mask"


@pytest.mark.parametrize(
    ("mismatches", "also_logged", "facts"),
    [
        pytest.param(
            [*SMALL_MISMATCHES, 0.004, 0.006, 0.008, 0.012, 0.015, 0.018],
            {},
            ["0.015 in the last", "weights that stay behind"],
            id="grows, as after skipped syncs",
        ),
        pytest.param(
            [*SMALL_MISMATCHES, 0.011, 0.009, 0.01, 0.008, 0.01, 0.009],
            {},
            [OTHER_PRECISION],
            id="stays, as with weights in 8 bits",
        ),
        pytest.param(
            [*SMALL_MISMATCHES, 0.011, 0.009, 0.01],
            {},
            ["too early to say", "older weights", OTHER_PRECISION],
            id="three steps ago",
        ),
        pytest.param(
            [0.004] * 4 + [0.017] * 9,
            {},
            ["0.017", "at most 0.004 before"],
            id="from what GPUs have",
        ),
        # The exponential of the negative KL is 0.95 on average.
        pytest.param(
            [*SMALL_MISMATCHES, *[0.011] * 6],
            {KL: 0.06, keys.SAMPLER_KL: 0.01},
            ["0.95", "mask leaves tokens out"],
            id="tokens left out",
        ),
        pytest.param(
            [*SMALL_MISMATCHES, *[0.011] * 6],
            {KL: 0.06, keys.SAMPLER_KL: 0.059},
            [OTHER_PRECISION, "weights always as late"],
            id="no token left out",
        ),
        pytest.param([*SMALL_MISMATCHES, *[0.011] * 6], {keys.STALENESS: 1.0}, None, id="older samples, as logged"),
        pytest.param([*SMALL_MISMATCHES[:2], *[0.011] * 6], {}, None, id="after two steps"),
        pytest.param([0.004 + 0.001 * step for step in range(15)], {}, None, id="slow growth"),
        pytest.param([0.004] * 5 + [0.017, 0.017] + [0.004] * 5, {}, None, id="for two steps"),
        pytest.param([*SMALL_MISMATCHES, *[9e-4] * 6], {}, None, id="still small"),
    ],
)
def test_a_jump_of_the_sampler_is_explained_as_far_as_the_log_tells(tmp_path, mismatches, also_logged, facts):
    rows = []
    for index, mismatch in enumerate(mismatches):
        row = {keys.MISMATCH: mismatch, keys.ENTROPY: 1.0}
        if index >= len(SMALL_MISMATCHES):
            row |= also_logged
        rows.append(row)
    write_log(tmp_path / "run/metrics.jsonl", rows)
    findings = answer("diagnose", tmp_path / "run")["findings"]
    onsets = [finding["onset"] for finding in findings if "jumps away" in finding["finding"]]
    if facts is None:
        assert onsets == []
    else:
        assert onsets == [5]
        assert_names(clipx("diagnose", tmp_path / "run"), *facts)
