"""The tokens that a report shows one by one, as data for its page."""

from math import isfinite
from typing import Any, NamedTuple

import pandas

from verl_clipx.analysis.runs.traced import EVENTS, HIGH, KEPT, LOW, OUT, TracedUpdate, has_bounds_on_ratio

MOST_COMPLETIONS = 64
MOST_TOKENS = 512
# The rules that judge every traced token, as the page calls them, and the columns of what each does.
JUDGED = {"own rule": "event", "GRPO": "under_grpo"}
RESPONSE = ["prompt", "sample"]
_VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


class Line(NamedTuple):
    """A completion.

    Args:
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
        groups: the shown completions of each prompt, in the order of the page; a prompt's hash where its text is
            unknown.
        responses: how many the update has.
        clipped: how many of the update's tokens the run's own rule and GRPO's clip.
        taken_out: how many were taken out before any clip.
        numbers: for the page's script: field to the values of the shown tokens, in the order of the page.
    """

    update: TracedUpdate
    groups: list[tuple[str, list[Line]]]
    responses: int
    clipped: dict[str, int]
    taken_out: int
    numbers: dict[str, list]


def visible(text: str) -> str:
    """Returns a token's text with visible signs for its white space."""
    return text.translate(_VISIBLE) if text.strip() else text.translate(_VISIBLE).replace(" ", "␣") or "∅"


def token_sections(updates: list[TracedUpdate]) -> list[Section]:
    """Chooses up to MOST_COMPLETIONS completions in all, the same number for each setting, prompt by prompt.

    The settings show the same prompts as far as they have them: first those where GRPO's rule clips tokens in every
    setting, then by the tokens that any rule clips in any of them, then by those that have an advantage.
    """
    if not updates:
        return []
    counted = [_count(update.tokens) for update in updates]
    prompts = pandas.concat(counted).groupby("prompt").sum()
    by_grpo = [counts.grpo.groupby("prompt").sum() for counts in counted]
    prompts["grpo"] = pandas.concat(by_grpo, axis=1).fillna(0).min(axis=1)
    order = prompts.sort_values(["grpo", "any", "learning"], ascending=False).index
    most = MOST_COMPLETIONS // len(updates)
    return [_section(update, counts, list(order), most) for update, counts in zip(updates, counted, strict=True)]


def _count(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Counts a response's tokens that GRPO's rule and any rule clips, and those that have an advantage."""
    clipped = tokens[[*JUDGED.values()]].isin([LOW, HIGH])
    counts = {"grpo": clipped.under_grpo, "any": clipped.any(axis=1), "learning": tokens.advantage != 0}
    return pandas.DataFrame(counts).groupby([tokens.prompt, tokens["sample"]]).sum()


def _section(update: TracedUpdate, counts: pandas.DataFrame, prompts: list[str], most: int) -> Section:
    # The page shows the first response by itself, under GRPO's rule.
    of_page = counts.reset_index().assign(place=lambda rows: rows.prompt.map(prompts.index))
    of_page = of_page.sort_values(["place", "grpo", "any"], ascending=[True, False, False]).head(most)
    ordered = update.tokens.sort_values([*RESPONSE, "position"], kind="stable")
    responses = dict(iter(ordered.groupby(RESPONSE)))
    groups, kept = [], []
    for prompt, rows in of_page.groupby("prompt", sort=False):
        shown = [responses[prompt, sample] for sample in rows["sample"]]
        groups.append((str(shown[0].prompt_text.iloc[0] or prompt), list(map(_line, shown))))
        kept += [response.iloc[:MOST_TOKENS] for response in shown]
    together = pandas.concat(kept)
    if has_bounds_on_ratio(update.tokens):
        together["low"] = together.low.clip(lower=0)
    clipped = {rule: int(update.tokens[column].isin([LOW, HIGH]).sum()) for rule, column in JUDGED.items()}
    taken_out = int((update.tokens.event == OUT).sum())
    return Section(update, groups, len(counts), clipped, taken_out, _numbers(together))


def _line(completion: pandas.DataFrame) -> Line:
    rows, first = completion.iloc[:MOST_TOKENS], completion.iloc[0]
    score = None if pandas.isna(first.score) else float(first.score)
    tokens = list(zip(map(visible, rows.text), map(_classes, rows.event, rows.under_grpo), strict=True))
    return Line(score, float(first.advantage), tokens, len(completion) - len(rows))


def _classes(own: str, grpo: str) -> str:
    """Returns the HTML classes of a token: its event under each rule; none where both keep it within the bounds."""
    return "" if {own, grpo} == {KEPT} else f"{own} g-{grpo}"


def _numbers(rows: pandas.DataFrame) -> dict[str, list[Any]]:
    def rounded(values: pandas.Series) -> list[float | None]:
        return [float(f"{value:.4g}") if isfinite(value) else None for value in map(float, values)]

    shown = ("ratio", "advantage", "old_log_prob", "log_prob", "low", "high", "weight")
    events = {name: [EVENTS.index(event) for event in rows[name]] for name in JUDGED.values()}
    return {**{name: rounded(rows[name]) for name in shown}, "region": list(rows.region), **events}
