"""What happened to traced tokens, under their own rule and under GRPO's, and which update is shown. By hand. Not
covered: the figures' looks; reading (test_traces.py).
"""

from dataclasses import asdict, dataclass, replace

import numpy
import pandas
import pytest

from tests.analysis.runs.example_runs import WHOLE_UPDATE, read_columns, write_run
from verl_clipx.analysis.report.palette import with_colours
from verl_clipx.analysis.report.token_view import MOST_RESPONSES, choose_sections, make_visible
from verl_clipx.analysis.report.tokens import choose_tokens, find_bins
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.analysis.runs.traced import events, traced_updates, under_grpo
from verl_clipx.run.trace_format import Shard, write_shard


@dataclass(frozen=True, kw_only=True)
class Token:
    """A traced token.

    Args:
        ratio, advantage: its own.
        region: where the ratio lies under the run's own rule, as its trace has it.
        weight: F of the run's own rule.
        event: what happened to it.
        under_grpo: what would have under GRPO's rule.
    """

    ratio: float
    advantage: float
    region: str
    weight: float
    event: str
    under_grpo: str


TOKENS = [
    Token(ratio=1.5, advantage=1.0, region="HP", weight=0.0, event="high", under_grpo="high"),
    Token(ratio=0.5, advantage=-1.0, region="LN", weight=0.0, event="low", under_grpo="low"),
    Token(ratio=1.5, advantage=-1.0, region="HN", weight=1.5, event="above", under_grpo="above"),
    Token(ratio=0.5, advantage=1.0, region="LP", weight=0.5, event="below", under_grpo="below"),
    Token(ratio=1.5, advantage=1.0, region="M", weight=1.5, event="kept", under_grpo="high"),
    Token(ratio=0.5, advantage=-1.0, region="M", weight=0.5, event="kept", under_grpo="low"),
    Token(ratio=1.5, advantage=1.0, region="HP", weight=1.2, event="above", under_grpo="high"),
    Token(ratio=1.5, advantage=0.0, region="M", weight=1.5, event="none", under_grpo="none"),
    Token(ratio=1.2, advantage=1.0, region="M", weight=1.2, event="kept", under_grpo="kept"),
    Token(ratio=0.8, advantage=-1.0, region="M", weight=0.8, event="kept", under_grpo="kept"),
    # Beyond the dual clip.
    Token(ratio=12.0, advantage=-1.0, region="HN", weight=0.0, event="high", under_grpo="above"),
    # A mask that drops whole tokens, wherever their ratio is.
    Token(ratio=1.0, advantage=1.0, region="M", weight=0.0, event="high", under_grpo="kept"),
]


def test_what_happened_to_tokens_and_what_would_have_under_grpo():
    table = pandas.DataFrame([asdict(token) for token in TOKENS])
    assert list(events(table.advantage, table.region, table.weight, table.ratio)) == list(table.event)
    assert list(under_grpo(table.ratio, table.advantage)) == list(table.under_grpo)


def make_updates(folder, *methods, **options):
    """Write a run of each method, and return the update that is shown of each."""
    runs = [read_run(write_run(folder / method, method, **options)) for method in methods]
    return traced_updates(with_colours(settings_of(runs)))


def test_the_last_update_with_an_advantage_in_all_runs_is_shown(tmp_path):
    runs = [read_run(write_run(tmp_path / method, method, steps=4)) for method in ("grpo", "acpo")]
    assert [(update.step, update.update) for update in traced_updates(settings_of(runs))] == [(4, 3), (4, 3)]
    columns = read_columns(runs[1].traces, Shard(4, 3, 0))
    columns["advantage"] = [0.0] * len(columns["ratio"])
    write_shard(runs[1].traces, Shard(4, 3, 0), columns, WHOLE_UPDATE)
    assert [(update.step, update.update) for update in traced_updates(settings_of(runs))] == [(4, 2), (4, 2)]


def test_without_traces_no_update_is_shown(tmp_path):
    assert make_updates(tmp_path, "grpo", traced=False) == []


def test_the_view_has_the_numbers_of_its_tokens_in_order(tmp_path):
    (update,) = make_updates(tmp_path, "grpo", steps=2)
    (section,) = choose_sections([update])
    lines = [line for _, lines_of_prompt in section.groups for line in lines_of_prompt]
    texts = [text for line in lines for text, _ in line.tokens]
    assert len(lines) <= MOST_RESPONSES
    assert len(texts) == len(section.numbers["ratio"]) == len(update.tokens)
    # The response with the most tokens that GRPO's rule clips comes first of its prompt's.
    first_prompt = section.groups[0][0]
    tokens = update.tokens[update.tokens.prompt_text == first_prompt].sort_values(["sample", "position"])
    responses = [rows for _, rows in tokens.groupby("sample")]
    responses.sort(key=lambda rows: -rows.under_grpo.isin(["low", "high"]).sum())
    tokens = pandas.concat(responses)
    assert texts[: len(tokens)] == [make_visible(text) for text in tokens.text]
    assert section.numbers["ratio"][: len(tokens)] == pytest.approx(tokens.ratio.tolist(), rel=1e-3)


def test_the_prompt_with_the_most_clipped_tokens_comes_first(tmp_path):
    (update,) = make_updates(tmp_path, "grpo", steps=2)
    (section,) = choose_sections([update])
    clipped_by_prompt = []
    for _, lines in section.groups:
        classes = [classes.split(" ")[0] for line in lines for _, classes in line.tokens]
        clipped_by_prompt.append(classes.count("low") + classes.count("high"))
    assert clipped_by_prompt[0] == max(clipped_by_prompt) > 0


def test_the_view_shows_64_responses_and_says_how_many_there_are(tmp_path):
    (update,) = make_updates(tmp_path, "grpo", steps=2)
    ten_prompts = [update.tokens.assign(prompt=f"p{number}") for number in range(10)]
    (section,) = choose_sections([replace(update, tokens=pandas.concat(ten_prompts, ignore_index=True))])
    assert sum(len(lines) for _, lines in section.groups) == 64
    assert section.number_of_responses == 80


def test_the_view_counts_the_tokens_that_either_rule_clips(tmp_path):
    (update,) = make_updates(tmp_path, "acpo", steps=2)
    clipped_by_own_rule = update.tokens.event.isin(["low", "high"]).sum()
    clipped_by_grpo = update.tokens.under_grpo.isin(["low", "high"]).sum()
    (section,) = choose_sections([update])
    assert section.clipped == {"own rule": clipped_by_own_rule, "GRPO": clipped_by_grpo}
    assert clipped_by_own_rule != clipped_by_grpo


def test_settings_show_the_same_prompts_those_that_any_rule_clips_first_then_those_that_learn(tmp_path):
    updates = []
    for update in make_updates(tmp_path, "grpo", "acpo", steps=2):
        rows = update.tokens.head(3).assign(event="kept", under_grpo="kept", advantage=0.0)
        prompts = [rows.assign(prompt=name, prompt_text=name) for name in "abc"]
        updates.append(replace(update, tokens=pandas.concat(prompts, ignore_index=True)))
    # Prompt b learns in the first run, and GRPO's rule clips a token of prompt c in the second one.
    updates[0].tokens.loc[updates[0].tokens.prompt == "b", "advantage"] = 1.0
    updates[1].tokens.loc[8, "under_grpo"] = "low"
    for section in choose_sections(updates):
        assert [prompt for prompt, _ in section.groups] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("\n", "⏎"),
        (" ", "␣"),
        (" a b", " a b"),
        ("", "∅"),
        ("a\tb", "a⇥b"),
        ("\u00a0", "␣"),
        ("\u3000\n", "␣⏎"),
        ("\f", "␣"),
    ],
)
def test_white_space_that_nobody_would_see_is_made_visible(text, visible):
    assert make_visible(text) == visible


def test_the_bin_of_probability_1_is_the_last():
    tokens = pandas.DataFrame({"old_log_prob": numpy.log([0.1, 0.2, 0.5, 0.99, 1.0])})
    assert list(find_bins(tokens)) == [0, 1, 2, 4, 4]


def test_clipped_tokens_are_drawn_before_others():
    tokens = choose_tokens(pandas.DataFrame({"event": ["kept"] * 5000 + ["low"] * 10}))
    assert len(tokens) == 1000
    assert (tokens.event == "low").sum() == 10
