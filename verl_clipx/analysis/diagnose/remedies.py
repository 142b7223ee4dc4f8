"""What to do about a finding, by the run's own configuration and log: nothing is advised that is set already.

Each function `advise_…` returns one advice for a run, as whole sentences.
"""

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import measure_target_of_rounding
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import BYPASS, CORRECTION_NODE, OLDEST_ALLOWED, ROLLOUT_IS, ROLLOUT_RS, TOO_OLD
from verl_clipx.run.sampling import is_number

# The upper bound on a token's ratio that DAPO uses.
DAPO_HIGH = 1.28
# The wide bounds on a token's ratio that docs/results/evidence.md tried.
WIDE_LOW = 0.5
WIDE_HIGH = 2.0
# verl's loss whose clip_ratio bounds the ratio of a token.
TOKEN_CLIP = "vanilla"
# The plugin's method whose clip_high bounds the ratio of a sequence.
SEQUENCE_CLIP = "gspo"
# The plugin's method whose ratio is to the policy that sampled, unless its parameter `behaviour` is another policy.
SAMPLER_RATIO = "m2po"
# The value of rollout_is with which verl weights a whole response by the product of its tokens' ratios.
OF_SEQUENCE = "sequence"
# The width of verl's clip on each side if the configuration sets none.
DEFAULT_CLIP_RATIO = 0.2

# Prompts are too easy or too hard if the mean score is nearer than this to an end of its range, as a part of the range.
NEAR_AN_END = 0.25

# Sentences after an advice: how to keep checkpoints, and what is known of the wide bounds.
NO_CHECKPOINT = "With trainer.save_freq above 0 there will be checkpoints to go back to."
LIMITS_OF_WIDE = (
    "On one toy task, in bypass mode, these bounds earned about as much as adaptive ones, with a better worst seed. "
    "Nobody measured whether they keep entropy."
)


def trains_our_loss(run: Run) -> bool:
    """Return whether the record names a loss of this plugin or, in a part of a record, parameters of one."""
    return run.record.loss.is_ours


def advise_on_values_not_finite(run: Run) -> str:
    """Advise where to look for the sources of values that are not finite: a run with this plugin names them."""
    logged_by_plugin = any(key in run.log for key in (keys.SKIPPED_UPDATES, *keys.HEALTH_COUNTS))
    loss = run.record.loss
    if logged_by_plugin or loss.method is not None or loss.function is not None:
        return "Look at the prompts and fields that the run's output names."
    return "Run again with +clipx=observe clipx.receipt=auto, whose output names rank, fields and prompts."


def advise_on_skipped_updates(run: Run) -> str:
    """Say what an update that is skipped means for the run, and advise where to look for its cause."""
    subject = "The policy" if run.takes_not_finite_updates is False else "If skipped, the policy"
    return (
        f"{subject} stayed as it was, so that such a step shows less of the method. {advise_on_values_not_finite(run)}"
    )


def advise_on_entropy_collapse(run: Run) -> str:
    """Return advice against a collapse of entropy: the first that a run has not followed yet.

    The order is: not to lower entropy by an entropy term, to widen the clip, to lower the learning rate.
    """
    coefficient = run.record.terms.entropy
    if is_number(coefficient) and coefficient < 0:
        return "Set actor.entropy_coeff to 0: below 0 it lowers entropy."
    if not clips_tokens(run):
        return "Lower actor.optim.lr: wider bounds were not tried with this loss."
    high = upper_bound(run)
    if high is None:
        return "Lower actor.optim.lr: the loss has no upper bound to raise."
    if high < DAPO_HIGH:
        raised = f"Raise {upper_bound_key(run)} to {upper_bound_value(run, DAPO_HIGH)}"
        return f"{raised}, as DAPO does against such a collapse."
    if high < WIDE_HIGH:
        return f"{advise_wide_bounds(run)} {LIMITS_OF_WIDE}"
    return f"Lower actor.optim.lr: the upper bound is {high:g} already."


def advise_on_entropy_explosion(run: Run) -> str:
    """Return advice against an explosion of entropy: a smaller entropy term or, without one, a lower learning rate."""
    coefficient = run.record.terms.entropy
    lower = "actor.entropy_coeff" if is_number(coefficient) and coefficient > 0 else "actor.optim.lr"
    if keeps_no_checkpoint(run):
        return f"Run again with a lower {lower}. {NO_CHECKPOINT}"
    return f"Go back to an earlier checkpoint, with a lower {lower}."


def advise_on_fallen_reward(run: Run) -> str:
    """Return advice for a run whose reward fell."""
    if keeps_no_checkpoint(run):
        return f"Run again with a lower actor.optim.lr. {NO_CHECKPOINT}"
    return "Go back to a checkpoint before the fall, with a lower actor.optim.lr."


def advise_on_fallen_held_out_score(run: Run) -> str:
    """Return advice for a run whose held-out score fell while its reward rose."""
    if keeps_no_checkpoint(run):
        return f"Find out what the reward pays for that the held-out score does not. {NO_CHECKPOINT}"
    return "Go back to the checkpoint with the best held-out score."


def advise_on_weights_not_finite(run: Run) -> str:
    """Return advice for a run whose weights may not be finite."""
    if keeps_no_checkpoint(run):
        return f"The weights may not be finite from then on: start again. {NO_CHECKPOINT}"
    return "The weights may not be finite from then on: resume from an earlier checkpoint."


def keeps_no_checkpoint(run: Run) -> bool:
    """Return whether the configuration says that the run saves no checkpoint."""
    every = run.record.length.save_every
    return is_number(every) and every <= 0


def advise_wide_bounds(run: Run) -> str:
    """Advise to set the bounds WIDE_LOW and WIDE_HIGH; a lower bound that is as low already is left out."""
    upper = f"{upper_bound_key(run)} to {upper_bound_value(run, WIDE_HIGH)}"
    if trains_our_loss(run):
        low = run.record.loss.parameters.get("clip_low")
        lower = f"clipx.clip_low to {WIDE_LOW:g}"
        # None stands for no lower bound, which is as wide as can be.
        is_wide = low is None or low <= WIDE_LOW
    else:
        width = clip_ratio(run, "clip_ratio_low")
        lower = f"actor.clip_ratio_low to {1 - WIDE_LOW:g}"
        is_wide = width >= 1 - WIDE_LOW
    if is_wide:
        return f"Widen the clip: set {upper}."
    return f"Widen the clip: set {upper}, and {lower}."


def clips_tokens(run: Run) -> bool:
    """Return whether the run's loss clips each token's ratio at fixed bounds; verl's default loss does."""
    if trains_our_loss(run):
        return run.method != SEQUENCE_CLIP and "clip_high" in run.record.loss.parameters
    return run.record.loss.mode in (None, TOKEN_CLIP)


def upper_bound(run: Run) -> float | None:
    """Return the upper bound on the ratio of a loss that clips tokens; None if it has none."""
    if trains_our_loss(run):
        return run.record.loss.parameters["clip_high"]
    return 1 + clip_ratio(run, "clip_ratio_high")


def clip_ratio(run: Run, name: str) -> float:
    """Return the width of verl's clip on one side, as verl reads it: the side's own key counts before clip_ratio.

    Args:
        run: a run of a loss of verl's.
        name: the side's own key, `clip_ratio_low` or `clip_ratio_high`.
    """
    for value in (run.record.loss.widths.get(name), run.record.loss.widths.get("clip_ratio")):
        if is_number(value):
            return float(value)
    return DEFAULT_CLIP_RATIO


def upper_bound_key(run: Run) -> str:
    """Return the key of the upper bound, as a remedy names it."""
    return "clipx.clip_high" if trains_our_loss(run) else "actor.clip_ratio_high"


def upper_bound_value(run: Run, bound: float) -> str:
    """Write an upper bound as the value of `upper_bound_key`; verl's key takes the width above 1."""
    if trains_our_loss(run):
        return f"{bound:g}"
    return f"{bound - 1:g}, which is a ratio of {bound:g}"


def advise_on_one_sided_clipping(run: Run, side: str) -> str:
    """Return advice for a run that clips nearly all its clipped tokens on one side.

    Args:
        run: the run.
        side: the side that clips, low or high.
    """
    if not trains_our_loss(run):
        return f"Widen that side's bound, actor.clip_ratio_{side}."
    other = "high" if side == "low" else "low"
    parameters = run.record.loss.parameters
    has_bound = f"clip_{side}" in parameters
    if not has_bound:
        return "Compare other settings on its traced tokens: clipx replay."
    # A bound that is a parameter without a value is switched off. A method without such a parameter has other bounds.
    other_is_off = f"clip_{other}" in parameters and parameters[f"clip_{other}"] is None
    if other_is_off:
        return f"Set clipx.clip_{other}: without that bound, only this side clips."
    return f"Widen that side's bound, clipx.clip_{side}."


def advise_on_alike_samples(run: Run) -> str:
    """Return advice for a run whose samples of a prompt score alike.

    If the sampling itself makes them alike, it is `advise_on_sampling`. Otherwise the advice is harder or easier
    prompts, by the place of the mean score between the lowest and the highest score.
    """
    sampling_advice = advise_on_sampling(run)
    if sampling_advice is not None:
        return sampling_advice
    mean = run.values(keys.REWARD)
    lowest = run.values(keys.LOWEST_REWARD).min()
    highest = run.values(keys.HIGHEST_REWARD).max()
    # A metric that is not logged gives NaN, and no comparison with NaN is true.
    if mean.empty or not lowest < highest:
        return "Take prompts whose samples score differently."
    last = mean.iloc[-1]
    score = f"The mean score is {last:.3g} in the last step, of {lowest:g} to {highest:g} in all steps"
    place = (last - lowest) / (highest - lowest)
    if place >= 1 - NEAR_AN_END:
        return f"{score}: take harder prompts."
    if place <= NEAR_AN_END:
        return f"{score}: take easier prompts."
    return f"{score}, so some prompts are always solved and others never: take those that are solved sometimes."


def advise_on_sampling(run: Run) -> str | None:
    """Return advice on the sampling if the configuration makes all samples of a prompt alike; None if it does not."""
    temperature = run.record.sampling.temperature
    if run.record.batch.responses == 1:
        return "Draw several samples of each prompt: raise rollout.n."
    if is_number(temperature) and temperature == 0:
        return "Sample at a temperature above 0, rollout.temperature: without it all samples of a prompt are alike."
    return None


def advise_on_missing_signal(run: Run) -> str:
    """Return advice for a run in which no advantage differs from 0.

    It depends on whether all samples of the last step have one score, and on whether this is the best score or none.
    """
    low = run.values(keys.LOWEST_REWARD)
    high = run.values(keys.HIGHEST_REWARD)
    if advise_on_sampling(run) or low.empty:
        return advise_on_alike_samples(run)
    # Compares the values and their step.
    all_score_alike = low.tail(1).equals(high.tail(1))
    if not all_score_alike:
        return advise_on_alike_samples(run)
    score = low.iloc[-1]
    # If all scores of the log are equal, those above 0 are taken for good ones.
    least = min(low.min(), 0.0)
    observation = f"All samples of the last step score {score:g}"
    if score > least and score >= high.max():
        return f"{observation}, the most in this log, so nothing is left to learn: take harder prompts."
    return f"{observation}, so nothing is learned: look whether the reward function reads the answers as it should."


def advise_more_updates(run: Run) -> str:
    """Advise several updates on a rollout batch."""
    if run.record.batch.mini_batch == 1:
        return "Raise actor.ppo_epochs: a mini-batch is one prompt already."
    return "Make actor.ppo_mini_batch_size smaller, so that each rollout batch gets several updates."


def advise_on_few_tokens_in_bins(run: Run) -> str:
    """Return advice for a run whose probability bins have too few tokens: more tokens, or a smaller alpha."""
    if run.record.loss.parameters.get("scope") == "micro_batch":
        return "Set clipx.scope to mini_batch, so that statistics are over all tokens of an update."
    prompts = run.record.batch.prompts
    mini_batch = run.record.batch.mini_batch
    if is_number(prompts) and is_number(mini_batch) and mini_batch >= prompts:
        return "Lower clipx.alpha: an update has all tokens of a rollout batch already."
    return "Make actor.ppo_mini_batch_size larger."


def advise_on_missed_target(run: Run) -> str:
    """Return advice for a run whose bounds miss the target that they hold."""
    rounding = measure_target_of_rounding(run)
    value = run.record.loss.modifiers.get("hold", {}).get("value")
    if rounding is None or not is_number(value) or rounding <= value:
        return "Raise clipx.hold.value."
    return (
        f"Raise clipx.hold.value above {rounding:.2g}, which rounding alone gives where nothing has moved, or compute "
        "in float32."
    )


def advise_on_anchored_ratio(run: Run) -> str:
    """Return advice for a run whose ratio is not 1 in the first update on a rollout batch."""
    bypass = run.record.correction.bypass
    if bypass:
        return f"Set {BYPASS} to false: with it the clip acts on the mismatch too."
    if bypass is None:
        return f"Check whether {BYPASS} is on: with it the clip acts on the mismatch too."
    return "Check how old the samples are (training/off_policy/trajectory_staleness/mean): bypass_mode is off already."


def advise_scoring_tokens(run: Run) -> str:
    """Advise how to find out which weights drew the samples."""
    if run.traces is not None and not run.traces.is_dir():
        return "Run again with +clipx/trace=prompts: clipx recompute RUN CHECKPOINT… then scores the new run's tokens."
    return "Score its traced tokens with the checkpoints around that step: clipx recompute RUN CHECKPOINT…"


def advise_on_drifting_sampler(run: Run) -> str:
    """Return advice for a run in which nothing is clipped, although the sampler has drifted away from the policy."""
    correction = run.record.correction
    if correction.bypass:
        return (
            "Narrow the bounds: in bypass mode the clip acts on the ratio to the sampler's probabilities, and yet "
            "nothing is clipped."
        )
    if takes_ratio_to_sampler(run):
        return (
            f"Narrow the bounds: with {run.loss} the clip acts on the ratio to the sampler's probabilities, and yet "
            "nothing is clipped."
        )
    # What to do outside bypass mode.
    corrections = []
    if correction.weights:
        corrections.append(ROLLOUT_IS)
    if correction.rejection:
        corrections.append(ROLLOUT_RS)
    if corrections:
        verb = "is" if len(corrections) == 1 else "are"
        advice = (
            f"give the sampler new weights more often: {' and '.join(corrections)} {verb} on already, and the clip "
            "does not act on the ratio to the sampler's probabilities."
        )
    else:
        advice = (
            f"correct for the sampler ({CORRECTION_NODE}): the clip acts on the ratio to the recomputed probabilities."
        )
    if correction.bypass is None:
        return f"If {BYPASS} is off, {advice} If it is on, narrow the bounds."
    return advice[0].upper() + advice[1:]


def takes_ratio_to_sampler(run: Run) -> bool:
    """Return whether the plugin's method takes its ratio to the policy that sampled, even outside bypass mode.

    False for a loss of verl's, and for one of the user's own, of which the record does not say it.
    """
    behaviour = run.record.loss.parameters.get("behaviour", "rollout")
    return run.record.loss.method == SAMPLER_RATIO and behaviour == "rollout"


def advise_on_dropped_prompts(run: Run) -> str:
    """Return advice for a run that drops prompts, with all their samples, for their age."""
    return (
        f"Set {TOO_OLD} to wait, or raise {OLDEST_ALLOWED}: a long answer takes longest, so dropping the oldest drops "
        "long answers first."
    )


def advise_on_collapsed_weights(run: Run) -> str:
    """Return advice for a run whose importance weights are worth few samples."""
    kind = run.record.correction.weights
    if kind is None:
        # The weights were logged, but the record does not say of which kind.
        return (
            f"If {ROLLOUT_IS} is {OF_SEQUENCE}, set it to token: with {OF_SEQUENCE}, a weight is the product of all "
            "ratios of a response."
        )
    if kind == OF_SEQUENCE:
        return f"Set {ROLLOUT_IS} to token: with {OF_SEQUENCE}, a weight is the product of all ratios of a response."
    return (
        f"Find out why the sampler and the trainer differ ({keys.MISMATCH}). With a weight for each token, the weights "
        "should stay near 1."
    )
