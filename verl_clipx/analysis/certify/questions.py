"""The questions about two arms, in the order in which they are answered."""

from verl_clipx.analysis.certify import dropped, of_samples, of_settings, of_training
from verl_clipx.analysis.certify.arms import Answer, Arms, Question

ASKED = (
    of_settings.differ_as_stated,
    of_settings.differ_in_seeds_only,
    of_settings.same_versions,
    of_settings.same_model,
    of_settings.same_data,
    of_settings.same_further_files,
    of_settings.same_start,
    of_settings.same_reward,
    of_settings.same_denominator,
    of_samples.seeds_reach,
    of_samples.samples_differ,
    of_samples.are_paired,
    of_samples.arms_part,
    of_samples.trained_once,
    of_samples.not_older,
    dropped.dropped_alike,
    of_training.trained_as_much,
    of_training.clip_acts,
    of_training.receipt_passed,
    of_training.same_validation,
)
QUESTIONS: dict[str, Question] = {asked.text: asked for asked in ASKED}


def answers_of(arms: Arms) -> list[Answer]:
    """Return an answer to every question."""
    return [asked.answer(arms) for asked in ASKED]
