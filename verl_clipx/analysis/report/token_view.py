"""The tokens that a report shows one by one, as data for its page."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import pandas

from verl_clipx.analysis.runs.traced import EVENTS, HIGH, KEPT, LOW, OUT, TracedUpdate, has_bounds_on_ratio

# The page shows at most this many responses in all.
MOST_RESPONSES = 64
# The page shows at most this many tokens of a response.
MOST_TOKENS = 512
OWN_RULE = "own rule"
GRPO_RULE = "GRPO"
# From each rule to the column that says what happens to a token under that rule.
EVENT_COLUMNS = {OWN_RULE: "event", GRPO_RULE: "under_grpo"}
# The columns that name a response.
RESPONSE = ["prompt", "sample"]
# The numbers of a token that the page shows.
SHOWN_NUMBERS = ("ratio", "advantage", "old_log_prob", "log_prob", "low", "high", "weight")
# How many significant digits the page keeps of a number.
DIGITS = 4
# The signs in place of line ends and tabs.
SIGNS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})
# The sign in place of any other white space.
BLANK_SIGN = "␣"
# What is shown of a token without text.
EMPTY_SIGN = "∅"


class ShownResponse(NamedTuple):
    """A response as the page shows it.

    Args:
        score: its reward; None where the trace lacks it.
        advantage: the advantage of its first token.
        tokens: for each shown token its text and its HTML classes, which name what happens to it under each rule.
        left_out: how many tokens at its end are not shown.
    """

    score: float | None
    advantage: float
    tokens: list[tuple[str, str]]
    left_out: int


class Section(NamedTuple):
    """The shown tokens of one setting's update.

    Args:
        name: the name of the run that traced them.
        colour: the setting's colour.
        step, update: the training step, and the number of the update in it, from 0.
        number_of_tokens: how many tokens the update has, shown or not.
        groups: the text of each shown prompt, or its hash where the text is unknown, with its shown responses, in the
            order of the page.
        number_of_responses: how many responses the update has, shown or not.
        clipped: from each rule to how many of the update's tokens it clips.
        taken_out: how many of the update's tokens were taken out before any clip.
        numbers: what the page's script reads: from a field to its values for the shown tokens, in the page's order.
    """

    name: str
    colour: str
    step: int
    update: int
    number_of_tokens: int
    groups: list[tuple[str, list[ShownResponse]]]
    number_of_responses: int
    clipped: dict[str, int]
    taken_out: int
    numbers: dict[str, list]


def make_visible(text: str) -> str:
    """Return a token's text with a sign in place of each line end and tab.

    In a text of nothing but white space, any other white space gets `BLANK_SIGN`. An empty text becomes `EMPTY_SIGN`.
    """
    if not text:
        return EMPTY_SIGN
    with_signs = text.translate(SIGNS)
    if text.isspace():
        return re.sub(r"\s", BLANK_SIGN, with_signs)
    return with_signs


def choose_sections(updates: Sequence[TracedUpdate]) -> list[Section]:
    """Choose the tokens that the page shows.

    Each setting shows the same number of responses, MOST_RESPONSES in all. The settings show the same prompts as far as
    they have them. Prompts are ordered by how many tokens GRPO's rule clips in the setting where it clips fewest. Ties
    are broken by how many tokens either rule clips in all settings, then by how many tokens have an advantage other
    than 0.

    Args:
        updates: the traced update of each setting.
    """
    if not updates:
        return []
    counts_of_updates = [_count_by_response(update.tokens) for update in updates]
    by_prompt = pandas.concat(counts_of_updates).groupby("prompt").sum()
    grpo_by_setting = [counts.grpo.groupby("prompt").sum() for counts in counts_of_updates]
    by_prompt["grpo"] = pandas.concat(grpo_by_setting, axis=1).fillna(0).min(axis=1)
    by_prompt = by_prompt.sort_values(["grpo", "any", "learning"], ascending=False)
    place_of_prompt = {prompt: place for place, prompt in enumerate(by_prompt.index)}
    most = MOST_RESPONSES // len(updates)
    return [
        _make_section(update, counts, place_of_prompt, most)
        for update, counts in zip(updates, counts_of_updates, strict=True)
    ]


def _count_by_response(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Count the tokens of each response.

    Args:
        tokens: the tokens of an update.

    Returns:
        A row for each prompt and sample: how many tokens GRPO's rule clips (`grpo`), how many either rule clips
        (`any`), and how many have an advantage other than 0 (`learning`).
    """
    clipped = tokens[[*EVENT_COLUMNS.values()]].isin([LOW, HIGH])
    marks = pandas.DataFrame(
        {
            "grpo": clipped[EVENT_COLUMNS[GRPO_RULE]],
            "any": clipped.any(axis=1),
            "learning": tokens.advantage != 0,
        }
    )
    return marks.groupby([tokens.prompt, tokens["sample"]]).sum()


def _make_section(
    update: TracedUpdate, counts: pandas.DataFrame, place_of_prompt: Mapping[str, int], most: int
) -> Section:
    """Return the responses of an update that the page shows, with the numbers of their tokens.

    Args:
        update: the setting's traced update.
        counts: the counts of the update's tokens, from `_count_by_response`.
        place_of_prompt: from each prompt to its place in the order in which prompts are shown.
        most: how many responses are shown at most.
    """
    ordered = update.tokens.sort_values([*RESPONSE, "position"], kind="stable")
    tokens_of_response = {response: rows for response, rows in ordered.groupby(RESPONSE)}
    groups: list[tuple[str, list[ShownResponse]]] = []
    shown_tokens: list[pandas.DataFrame] = []
    for prompt, chosen in _choose_responses(counts, place_of_prompt, most).groupby("prompt", sort=False):
        responses = [tokens_of_response[prompt, sample] for sample in chosen["sample"]]
        prompt_text = str(responses[0].prompt_text.iloc[0] or prompt)
        groups.append((prompt_text, [_show_response(response) for response in responses]))
        shown_tokens += [response.iloc[:MOST_TOKENS] for response in responses]
    all_shown = pandas.concat(shown_tokens)
    if has_bounds_on_ratio(update.tokens):
        # A ratio is never negative, so a bound below 0 has the same effect as 0.
        all_shown["low"] = all_shown.low.clip(lower=0)
    clipped: dict[str, int] = {}
    for rule, column in EVENT_COLUMNS.items():
        clipped[rule] = int(update.tokens[column].isin([LOW, HIGH]).sum())
    return Section(
        name=update.setting.name_of(update.run),
        colour=update.setting.colour,
        step=update.step,
        update=update.update,
        number_of_tokens=len(update.tokens),
        groups=groups,
        number_of_responses=len(counts),
        clipped=clipped,
        taken_out=int((update.tokens.event == OUT).sum()),
        numbers=_list_numbers(all_shown),
    )


def _choose_responses(counts: pandas.DataFrame, place_of_prompt: Mapping[str, int], most: int) -> pandas.DataFrame:
    """Return the rows of the responses that are shown, in the order of the page.

    The prompts come in their order. Within a prompt, the responses in which GRPO's rule clips most tokens come first,
    because the page shows the first response by itself, under GRPO's rule. The arguments are those of `_make_section`.
    """
    rows = counts.reset_index()
    rows["place"] = rows.prompt.map(place_of_prompt)
    rows = rows.sort_values(["place", "grpo", "any"], ascending=[True, False, False])
    return rows.head(most)


def _show_response(response: pandas.DataFrame) -> ShownResponse:
    """Return a response as the page shows it, cut after MOST_TOKENS tokens; `response` has a row for each token."""
    shown = response.iloc[:MOST_TOKENS]
    first_token = response.iloc[0]
    tokens: list[tuple[str, str]] = []
    for text, own_event, grpo_event in zip(shown.text, shown.event, shown.under_grpo, strict=True):
        tokens.append((make_visible(text), _name_classes(own_event, grpo_event)))
    return ShownResponse(
        score=None if pandas.isna(first_token.score) else float(first_token.score),
        advantage=float(first_token.advantage),
        tokens=tokens,
        left_out=len(response) - len(shown),
    )


def _name_classes(own_event: str, grpo_event: str) -> str:
    """Return the HTML classes of a token: its event under each rule; "" if it is within the bounds under both."""
    if own_event == KEPT and grpo_event == KEPT:
        return ""
    return f"{own_event} g-{grpo_event}"


def _list_numbers(tokens: pandas.DataFrame) -> dict[str, list[Any]]:
    """Return what the page's script reads of the tokens: numbers, regions, and events by their place in EVENTS."""
    values_of_field: dict[str, list[Any]] = {}
    for name in SHOWN_NUMBERS:
        values_of_field[name] = [_round_number(value) for value in tokens[name]]
    values_of_field["region"] = list(tokens.region)
    for column in EVENT_COLUMNS.values():
        values_of_field[column] = [EVENTS.index(event) for event in tokens[column]]
    return values_of_field


def _round_number(value: float) -> float | None:
    """Return a number rounded to DIGITS significant digits; None if it is not finite."""
    if not isfinite(value):
        return None
    return float(f"{float(value):.{DIGITS}g}")
