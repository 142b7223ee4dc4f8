"""The tokens that a report shows one by one, as data for its page."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import pandas

from verl_clipx.runs.traced import EVENTS, HIGH, KEPT, LOW, OUT, TracedUpdate

MOST_COMPLETIONS = 64
MOST_TOKENS = 512
# The rules that judge every traced token, as the page calls them, and the columns of what each does.
JUDGED = {"own rule": "event", "GRPO": "under_grpo"}
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


class Group(NamedTuple):
    """The completions, at least one, of one prompt under one setting; the prompt's hash where its text is unknown."""

    prompt: str
    lines: list[Line]


@dataclass(frozen=True)
class Section:
    """What is shown of one setting's update.

    Args:
        groups: its prompts, in the order of the page.
        clipped: how many of the update's tokens the run's own rule and GRPO's clip.
        numbers: for the page's script: field to the values of the shown tokens, in the order of the page.
    """

    update: TracedUpdate
    groups: list[Group]
    clipped: list[tuple[str, int]]
    numbers: dict[str, list]

    @property
    def responses(self) -> str:
        """How many responses are shown, of how many."""
        shown, tokens = sum(len(group.lines) for group in self.groups), self.update.tokens
        return f"{shown} of {tokens.groupby(['prompt', 'sample']).ngroups} responses"

    @property
    def has_out(self) -> bool:
        """Whether a token was taken out before any clip."""
        return bool((self.update.tokens.event == OUT).any())

    @property
    def counted(self) -> str:
        """How many of the update's tokens each rule clips."""
        clipped = ", ".join(f"{count} under {rule}" for rule, count in self.clipped)
        return f"Clipped of the {len(self.update.tokens)} tokens of this update: {clipped}."


def visible(text: str) -> str:
    """A token's text with visible signs for its white space."""
    return text.translate(_VISIBLE) if text.strip() else text.translate(_VISIBLE).replace(" ", "␣") or "∅"


def token_sections(updates: list[TracedUpdate]) -> list[Section]:
    """Up to MOST_COMPLETIONS completions in all, the same number for each setting, prompt by prompt.

    The settings show the same prompts as far as they have them: first those where GRPO's rule clips tokens in every
    setting, then by the tokens that any rule clips in any of them, then by those that have an advantage.
    """
    if not updates:
        return []
    prompts = _ordered_prompts([update.tokens for update in updates])
    return [_section(update, prompts, MOST_COMPLETIONS // len(updates)) for update in updates]


def _ordered_prompts(of_updates: list[pandas.DataFrame]) -> list[str]:
    by_grpo = [tokens.under_grpo.isin([LOW, HIGH]).groupby(tokens.prompt).sum() for tokens in of_updates]
    tokens = pandas.concat(of_updates)
    counts = pandas.DataFrame({"clipped": _is_clipped_by_any(tokens), "learning": tokens.advantage != 0})
    counts = counts.groupby(tokens.prompt).sum().assign(every=pandas.concat(by_grpo, axis=1).fillna(0).min(axis=1))
    return list(counts.sort_values(["every", "clipped", "learning"], ascending=False).index)


def _is_clipped_by_any(tokens: pandas.DataFrame) -> pandas.Series:
    return tokens[[*JUDGED.values()]].isin([LOW, HIGH]).any(axis=1)


def _clipped_by_grpo_and_any(tokens: pandas.DataFrame) -> tuple[int, int]:
    return int(tokens.under_grpo.isin([LOW, HIGH]).sum()), int(_is_clipped_by_any(tokens).sum())


def _section(update: TracedUpdate, prompts: list[str], most: int) -> Section:
    tokens = update.tokens.sort_values(["prompt", "sample", "position"], kind="stable")
    groups, kept, left = [], [], most
    for prompt in prompts:
        samples = [rows for _, rows in tokens[tokens.prompt == prompt].groupby("sample")]
        # The page shows the first response by itself, under GRPO's rule.
        samples = sorted(samples, key=_clipped_by_grpo_and_any, reverse=True)[:left]
        left -= len(samples)
        if samples:
            lines = [_line(rows) for rows in samples]
            groups.append(Group(str(samples[0].prompt_text.iloc[0] or prompt), lines))
            kept += [rows.iloc[:MOST_TOKENS] for rows in samples]
    together = pandas.concat(kept)
    if update.has_bounds_on_ratio:
        together["low"] = together.low.clip(lower=0)
    return Section(
        update,
        groups,
        [(rule, int(tokens[column].isin([LOW, HIGH]).sum())) for rule, column in JUDGED.items()],
        _numbers(together),
    )


def _line(completion: pandas.DataFrame) -> Line:
    rows, first = completion.iloc[:MOST_TOKENS], completion.iloc[0]
    score = None if pandas.isna(first.score) else float(first.score)
    tokens = list(zip(map(visible, rows.text), map(_classes, rows.event, rows.under_grpo), strict=True))
    return Line(score, float(first.advantage), tokens, len(completion) - len(rows))


def _classes(own: str, grpo: str) -> str:
    """The HTML classes of a token: its event under each rule; none for one that both keep within the bounds."""
    return "" if {own, grpo} == {KEPT} else f"{own} g-{grpo}"


def _numbers(rows: pandas.DataFrame) -> dict[str, list[Any]]:
    def rounded(values: pandas.Series) -> list[float | None]:
        return [float(f"{value:.4g}") if isfinite(value) else None for value in map(float, values)]

    shown = ("ratio", "advantage", "old_log_prob", "log_prob", "low", "high", "weight")
    events = {name: [EVENTS.index(event) for event in rows[name]] for name in JUDGED.values()}
    return {**{name: rounded(rows[name]) for name in shown}, "region": list(rows.region), **events}
