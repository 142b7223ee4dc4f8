"""What to do about a finding, by the run's own configuration and log: nothing is advised that is set already."""

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import target_of_rounding
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import BYPASS, OF_CORRECTION, OLDEST_ALLOWED, ROLLOUT_IS, ROLLOUT_RS, TOO_OLD
from verl_clipx.run.sampling import is_number

# The upper bound on a token's ratio that DAPO uses, and the wide bounds that docs/results/evidence.md tried.
DAPO_HIGH = 1.28
WIDE_LOW = 0.5
WIDE_HIGH = 2.0
# verl's loss whose clip_ratio bounds a token's ratio, and the plugin's whose clip_high bounds a sequence's.
TOKEN_CLIP = "vanilla"
SEQUENCE_CLIP = "gspo"

# A mean score nearer than this to an end of its range, as a part of the range, says that prompts are too easy or hard.
NEAR_AN_END = 0.25


def trains_our_loss(run: Run) -> bool:
    """Returns whether the record names a loss of this plugin or, in a part of a record, parameters of one."""
    return run.record.loss.is_ours


def name_sources(run: Run) -> str:
    """Says where the sources of values that are not finite are named: in the output of a run with this plugin."""
    logged_by_plugin = any(key in run.log for key in (keys.SKIPPED_UPDATES, *keys.HEALTH_COUNTS))
    loss = run.record.loss
    if logged_by_plugin or loss.method is not None or loss.function is not None:
        return "Look at the prompts and fields that the run's output names."
    return "Run again with +clipx=observe clipx.receipt=auto, whose output names rank, fields and prompts."


def explain_skipped(run: Run) -> str:
    """Says what skipped updates leave, and what to look at."""
    subject = "The policy" if run.takes_not_finite_updates is False else "If skipped, the policy"
    return f"{subject} stayed as it was, so that such a step shows less of the method. {name_sources(run)}"


def keep_entropy(run: Run) -> str:
    """Advises against a collapse of entropy.

    First comes what lowers entropy by itself, then a wider clip, then a lower learning rate.
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
        return f"{widen_both(run)} {LIMITS_OF_WIDE}"
    return f"Lower actor.optim.lr: the upper bound is {high:g} already."


def calm_entropy(run: Run) -> str:
    """Advises against an explosion of entropy: less of what raises it by itself, otherwise a lower learning rate."""
    coefficient = run.record.terms.entropy
    lower = "actor.entropy_coeff" if is_number(coefficient) and coefficient > 0 else "actor.optim.lr"
    if keeps_no_checkpoint(run):
        return f"Run again with a lower {lower}. {NO_CHECKPOINT}"
    return f"Go back to an earlier checkpoint, with a lower {lower}."


def go_back_before_fall(run: Run) -> str:
    """Advises after a fall of the reward."""
    if keeps_no_checkpoint(run):
        return f"Run again with a lower actor.optim.lr. {NO_CHECKPOINT}"
    return "Go back to a checkpoint before the fall, with a lower actor.optim.lr."


def go_back_to_best(run: Run) -> str:
    """Advises where the held-out score fell."""
    if keeps_no_checkpoint(run):
        return f"Find out what the reward pays for that the held-out score does not. {NO_CHECKPOINT}"
    return "Go back to the checkpoint with the best held-out score."


def resume_before(run: Run) -> str:
    """Advises where the weights may not be finite."""
    if keeps_no_checkpoint(run):
        return f"The weights may not be finite from then on: start again. {NO_CHECKPOINT}"
    return "The weights may not be finite from then on: resume from an earlier checkpoint."


NO_CHECKPOINT = "With trainer.save_freq above 0 there will be checkpoints to go back to."


def keeps_no_checkpoint(run: Run) -> bool:
    """Returns whether the configuration says that the run saves no checkpoint."""
    every = run.record.length.save_every
    return is_number(every) and every <= 0


LIMITS_OF_WIDE = (
    "On one toy task, in bypass mode, these bounds earned about as much as adaptive ones, with a better worst seed. "
    "Nobody measured whether they keep entropy."
)


def widen_both(run: Run) -> str:
    """Advises the bounds 0.5 and 2, and leaves out a lower bound that is as low already."""
    upper = f"{upper_bound_key(run)} to {upper_bound_value(run, WIDE_HIGH)}"
    if trains_our_loss(run):
        low = run.record.loss.parameters.get("clip_low")
        # Without a lower bound it is as wide as can be.
        lower = f"clipx.clip_low to {WIDE_LOW:g}"
        is_wide = low is None or low <= WIDE_LOW
    else:
        width = clip_ratio(run, "clip_ratio_low")
        lower = f"actor.clip_ratio_low to {1 - WIDE_LOW:g}"
        is_wide = width >= 1 - WIDE_LOW
    if is_wide:
        return f"Widen the clip: set {upper}."
    return f"Widen the clip: set {upper}, and {lower}."


def clips_tokens(run: Run) -> bool:
    """Returns whether the run's loss clips each token's ratio at fixed bounds; verl's default loss does."""
    if trains_our_loss(run):
        return run.method != SEQUENCE_CLIP and "clip_high" in run.record.loss.parameters
    return run.record.loss.mode in (None, TOKEN_CLIP)


def upper_bound(run: Run) -> float | None:
    """Returns the upper bound on the ratio of a loss that clips tokens; None if it has none."""
    if trains_our_loss(run):
        return run.record.loss.parameters["clip_high"]
    return 1 + clip_ratio(run, "clip_ratio_high")


def clip_ratio(run: Run, name: str) -> float:
    """Returns verl's width of the clip on one side, as verl reads it."""
    for value in (run.record.loss.widths.get(name), run.record.loss.widths.get("clip_ratio")):
        if is_number(value):
            return float(value)
    return 0.2


def upper_bound_key(run: Run) -> str:
    """Returns the key of the upper bound, as a remedy names it."""
    return "clipx.clip_high" if trains_our_loss(run) else "actor.clip_ratio_high"


def upper_bound_value(run: Run, bound: float) -> str:
    """Writes an upper bound as its key takes it; verl's takes the width above 1."""
    if trains_our_loss(run):
        return f"{bound:g}"
    return f"{bound - 1:g}, which is a ratio of {bound:g}"


def widen_side(run: Run, side: str) -> str:
    """Advises where nearly all that is clipped is on one side.

    Args:
        side: the clipped side, low or high.
    """
    other = {"low": "high", "high": "low"}[side]
    ours = trains_our_loss(run)
    own_key = f"clipx.clip_{side}"
    parameters = run.record.loss.parameters
    if ours and f"clip_{side}" not in parameters:
        return "Compare other settings on its traced tokens: clipx replay."
    if ours and parameters.get(f"clip_{other}", 0) is None:
        return f"Set clipx.clip_{other}: without that bound, only this side clips."
    name = own_key if ours else f"actor.clip_ratio_{side}"
    return f"Widen that side's bound, {name}."


def change_prompts(run: Run) -> str:
    """Advises where samples score alike: what makes them alike, or harder or easier prompts, by what they score."""
    sampling_advice = change_sampling(run)
    if sampling_advice is not None:
        return sampling_advice
    mean = run.values(keys.REWARD)
    lowest = run.values(keys.LOWEST_REWARD).min()
    highest = run.values(keys.HIGHEST_REWARD).max()
    # Without these metrics they are NaN, which is not below anything.
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


def change_sampling(run: Run) -> str | None:
    """Returns advice on the sampling, if the configuration itself makes all samples of a prompt score alike."""
    temperature = run.record.sampling.temperature
    if run.record.batch.responses == 1:
        return "Draw several samples of each prompt: raise rollout.n."
    if is_number(temperature) and temperature == 0:
        return "Sample at a temperature above 0, rollout.temperature: without it all samples of a prompt are alike."
    return None


def find_signal(run: Run) -> str:
    """Advises where no advantage differs from 0: whether the prompts are all solved, or none scores, or they differ."""
    low = run.values(keys.LOWEST_REWARD)
    high = run.values(keys.HIGHEST_REWARD)
    if change_sampling(run) or low.empty:
        return change_prompts(run)
    all_score_alike = low.tail(1).equals(high.tail(1))
    if not all_score_alike:
        return change_prompts(run)
    score = low.iloc[-1]
    # Of scores that never changed nothing else says whether they are good: those above 0 are taken for good ones.
    least = min(low.min(), 0.0)
    observation = f"All samples of the last step score {score:g}"
    if score > least and score >= high.max():
        return f"{observation}, the most in this log, so nothing is left to learn: take harder prompts."
    return f"{observation}, so nothing is learned: look whether the reward function reads the answers as it should."


def make_more_updates(run: Run) -> str:
    """Advises several updates on a rollout batch."""
    if run.record.batch.mini_batch == 1:
        return "Raise actor.ppo_epochs: a mini-batch is one prompt already."
    return "Make actor.ppo_mini_batch_size smaller, so that each rollout batch gets several updates."


def fill_bins(run: Run) -> str:
    """Advises more tokens for each probability bin."""
    if run.record.loss.parameters.get("scope") == "micro_batch":
        return "Set clipx.scope to mini_batch, so that statistics are over all tokens of an update."
    prompts = run.record.batch.prompts
    mini_batch = run.record.batch.mini_batch
    if is_number(prompts) and is_number(mini_batch) and mini_batch >= prompts:
        return "Lower clipx.alpha: an update has all tokens of a rollout batch already."
    return "Make actor.ppo_mini_batch_size larger."


def raise_target(run: Run) -> str:
    """Advises what to do when bounds miss the target that they hold."""
    rounding = target_of_rounding(run)
    value = run.record.loss.modifiers.get("hold", {}).get("value")
    if rounding is None or not is_number(value) or rounding <= value:
        return "Raise clipx.hold.value."
    return (
        f"Raise clipx.hold.value above {rounding:.2g}, which rounding alone gives where nothing has moved, or compute "
        "in float32."
    )


def recompute_ratio(run: Run) -> str:
    """Advises what to do when the ratio of a first update is not 1."""
    bypass = run.record.correction.bypass
    if bypass:
        return f"Set {BYPASS} to false: with it the clip acts on the mismatch too."
    if bypass is None:
        return f"Check whether {BYPASS} is on: with it the clip acts on the mismatch too."
    return "Check how old the samples are (training/off_policy/trajectory_staleness/mean): bypass_mode is off already."


def score_tokens(run: Run) -> str:
    """Advises how to find out which weights drew the samples."""
    if run.traces is not None and not run.traces.is_dir():
        return "Run again with +clipx/trace=prompts: clipx recompute RUN CHECKPOINT… then scores the new run's tokens."
    return "Score its traced tokens with the checkpoints around that step: clipx recompute RUN CHECKPOINT…"


def correct_sampler(run: Run) -> str:
    """Advises what to do when the policy leaves its sampler and nothing is clipped."""
    correction = run.record.correction
    if correction.bypass:
        return "Narrow the bounds: in bypass mode the clip's ratio is taken to the sampler, and yet nothing is clipped."
    if correction.weights or correction.rejection:
        key = ROLLOUT_IS if correction.weights else ROLLOUT_RS
        return f"Give the sampler new weights more often: {key} is on already, and the clip does not see its ratio."
    return f"Correct for the sampler ({OF_CORRECTION}): the clip's ratio is taken to recomputed log-probabilities."


def keep_old_groups(run: Run) -> str:
    """Advises what to do when groups are dropped for their age."""
    return (
        f"Set {TOO_OLD} to wait, or raise {OLDEST_ALLOWED}: a long answer takes longest, so dropping the oldest drops "
        "long answers first."
    )


# The value of rollout_is with which verl weights a whole response by the product of its tokens' ratios.
OF_SEQUENCE = "sequence"


def weigh_tokens(run: Run) -> str:
    """Advises what to do when the importance weights are worth few samples."""
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
