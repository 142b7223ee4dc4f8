"""The tokens that a report shows one by one, as data for its page."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

import pandas

from verl_clipx.analysis.runs.traced import EVENTS, HIGH, KEPT, LOW, OUT, TracedUpdate, has_bounds_on_ratio

MOST_COMPLETIONS = 64
MOST_TOKENS = 512
OWN_RULE = "own rule"
GRPO_RULE = "GRPO"
# The rules that judge every traced token, as the page calls them, and the columns of what each does.
JUDGED = {OWN_RULE: "event", GRPO_RULE: "under_grpo"}
RESPONSE = ["prompt", "sample"]
# The numbers of a token that the page shows.
SHOWN = ("ratio", "advantage", "old_log_prob", "log_prob", "low", "high", "weight")
# Of which so many digits are kept.
DIGITS = 4
_VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


class Completion(NamedTuple):
    """A completion.

    Args:
        score: its reward; None where the trace lacks it.
        advantage: of its first token.
        tokens: text and HTML classes of each token; the classes name its events under the run's own rule and GRPO's.
        left_out: how many tokens at its end are not shown.
    """

    score: float | None
    advantage: float
    tokens: list[tuple[str, str]]
    left_out: int


class Section(NamedTuple):
    """The shown tokens of one setting's update.

    Args:
        name: of the run that traced them.
        colour: of its setting.
        step, update: which update; the first of a step is 0.
        total: how many tokens the update has.
        groups: the shown completions of each prompt, in the order of the page; a prompt's hash where its text is
            unknown.
        responses: how many the update has.
        clipped: how many of the update's tokens the run's own rule and GRPO's clip.
        taken_out: how many were taken out before any clip.
        numbers: for the page's script: field to the values of the shown tokens, in the order of the page.
    """

    name: str
    colour: str
    step: int
    update: int
    total: int
    groups: list[tuple[str, list[Completion]]]
    responses: int
    clipped: dict[str, int]
    taken_out: int
    numbers: dict[str, list]


def visible(text: str) -> str:
    """Returns a token's text with visible signs for its white space."""
    with_signs = text.translate(_VISIBLE)
    if text.strip():
        return with_signs
    return with_signs.replace(" ", "␣") or "∅"


def choose_sections(updates: Sequence[TracedUpdate]) -> list[Section]:
    """Chooses up to MOST_COMPLETIONS completions in all, the same number for each setting, prompt by prompt.

    The settings show the same prompts as far as they have them: first those where GRPO's rule clips tokens in every
    setting, then by the tokens that any rule clips in any of them, then by those that have an advantage.
    """
    if not updates:
        return []
    counts = [_count_by_response(update.tokens) for update in updates]
    prompts = pandas.concat(counts).groupby("prompt").sum()
    clipped_by_grpo = [of_update.grpo.groupby("prompt").sum() for of_update in counts]
    prompts["grpo"] = pandas.concat(clipped_by_grpo, axis=1).fillna(0).min(axis=1)
    order = list(prompts.sort_values(["grpo", "any", "learning"], ascending=False).index)
    most = MOST_COMPLETIONS // len(updates)
    return [_section_of(update, of_update, order, most) for update, of_update in zip(updates, counts, strict=True)]


def _count_by_response(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Counts a response's tokens that GRPO's rule and any rule clips, and those that have an advantage."""
    clipped = tokens[[*JUDGED.values()]].isin([LOW, HIGH])
    counted = pandas.DataFrame(
        {"grpo": clipped[JUDGED[GRPO_RULE]], "any": clipped.any(axis=1), "learning": tokens.advantage != 0}
    )
    return counted.groupby([tokens.prompt, tokens["sample"]]).sum()


def _section_of(update: TracedUpdate, counts: pandas.DataFrame, prompts: list[str], most: int) -> Section:
    """Chooses the completions of an update that the page shows.

    Args:
        update: the setting's.
        counts: from `_count_by_response`.
        prompts: all prompts, those that are shown first at the beginning.
        most: how many completions are shown at most.
    """
    # The page shows the first response by itself, under GRPO's rule.
    shown = counts.reset_index().assign(place=lambda rows: rows.prompt.map(prompts.index))
    shown = shown.sort_values(["place", "grpo", "any"], ascending=[True, False, False]).head(most)
    ordered = update.tokens.sort_values([*RESPONSE, "position"], kind="stable")
    tokens_of_response = dict(iter(ordered.groupby(RESPONSE)))
    groups = []
    shown_tokens = []
    for prompt, rows in shown.groupby("prompt", sort=False):
        responses = [tokens_of_response[prompt, sample] for sample in rows["sample"]]
        prompt_text = str(responses[0].prompt_text.iloc[0] or prompt)
        groups.append((prompt_text, [_completion_of(response) for response in responses]))
        shown_tokens += [response.iloc[:MOST_TOKENS] for response in responses]
    together = pandas.concat(shown_tokens)
    if has_bounds_on_ratio(update.tokens):
        together["low"] = together.low.clip(lower=0)
    return Section(
        name=update.setting.name_of(update.run),
        colour=update.setting.colour,
        step=update.step,
        update=update.update,
        total=len(update.tokens),
        groups=groups,
        responses=len(counts),
        clipped={rule: int(update.tokens[column].isin([LOW, HIGH]).sum()) for rule, column in JUDGED.items()},
        taken_out=int((update.tokens.event == OUT).sum()),
        numbers=_numbers_of(together),
    )


def _completion_of(response: pandas.DataFrame) -> Completion:
    """Returns a response as the page shows it, cut after MOST_TOKENS tokens."""
    rows = response.iloc[:MOST_TOKENS]
    first = response.iloc[0]
    texts = [visible(text) for text in rows.text]
    classes = [_classes(own, grpo) for own, grpo in zip(rows.event, rows.under_grpo, strict=True)]
    return Completion(
        score=None if pandas.isna(first.score) else float(first.score),
        advantage=float(first.advantage),
        tokens=list(zip(texts, classes, strict=True)),
        left_out=len(response) - len(rows),
    )


def _classes(own: str, grpo: str) -> str:
    """Returns the HTML classes of a token: its event under each rule; none where both keep it within the bounds."""
    return "" if {own, grpo} == {KEPT} else f"{own} g-{grpo}"


def _numbers_of(tokens: pandas.DataFrame) -> dict[str, list[Any]]:
    """Returns what the page's script reads: numbers, regions, and events by their place in EVENTS."""
    numbers: dict[str, list[Any]] = {}
    for name in SHOWN:
        numbers[name] = [_rounded(value) for value in tokens[name]]
    numbers["region"] = list(tokens.region)
    for name in JUDGED.values():
        numbers[name] = [EVENTS.index(event) for event in tokens[name]]
    return numbers


def _rounded(value: float) -> float | None:
    """Returns a number with few digits; None if it is not finite."""
    if not isfinite(value):
        return None
    return float(f"{float(value):.{DIGITS}g}")
