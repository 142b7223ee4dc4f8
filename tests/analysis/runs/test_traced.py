"""What happened to traced tokens, under their own rule and under GRPO's, and which update is shown. By hand. Not
covered: the figures' looks; reading (test_traces.py).
"""

from dataclasses import replace

import numpy
import pandas
import pytest

from tests.analysis.runs.example_runs import WHOLE, read_columns, write_run
from verl_clipx.analysis.report.palette import with_colours
from verl_clipx.analysis.report.token_view import MOST_RESPONSES, choose_sections, make_visible
from verl_clipx.analysis.report.tokens import choose_tokens, find_bins
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.analysis.runs.traced import events, traced_updates, under_grpo
from verl_clipx.run.trace_format import Shard, write_shard

# ratio, advantage, region, F, what happened, what GRPO would have done
TOKENS = [
    (1.5, 1.0, "HP", 0.0, "high", "high"),
    (0.5, -1.0, "LN", 0.0, "low", "low"),
    (1.5, -1.0, "HN", 1.5, "above", "above"),
    (0.5, 1.0, "LP", 0.5, "below", "below"),
    (1.5, 1.0, "M", 1.5, "kept", "high"),
    (0.5, -1.0, "M", 0.5, "kept", "low"),
    (1.5, 1.0, "HP", 1.2, "above", "high"),
    (1.5, 0.0, "M", 1.5, "none", "none"),
    (1.2, 1.0, "M", 1.2, "kept", "kept"),
    (0.8, -1.0, "M", 0.8, "kept", "kept"),
    # Beyond the dual clip.
    (12.0, -1.0, "HN", 0.0, "high", "above"),
    # A mask that drops whole tokens, wherever their ratio is.
    (1.0, 1.0, "M", 0.0, "high", "kept"),
]


def test_what_happened_to_tokens_and_what_would_have_under_grpo():
    table = pandas.DataFrame(TOKENS, columns=["ratio", "advantage", "region", "weight", "own", "grpo"])
    assert list(events(table.advantage, table.region, table.weight, table.ratio)) == list(table.own)
    assert list(under_grpo(table.ratio, table.advantage)) == list(table.grpo)


def updates_of(folder, *methods, **options):
    return traced_updates(
        with_colours(settings_of([read_run(write_run(folder / name, name, **options)) for name in methods]))
    )


def test_the_last_update_with_an_advantage_is_shown(tmp_path):
    runs = [read_run(write_run(tmp_path / name, name, steps=4)) for name in ("grpo", "acpo")]
    assert [(one.step, one.update) for one in traced_updates(settings_of(runs))] == [(4, 3), (4, 3)]
    columns = read_columns(runs[1].traces, Shard(4, 3, 0))
    write_shard(runs[1].traces, Shard(4, 3, 0), {**columns, "advantage": [0.0] * len(columns["ratio"])}, WHOLE)
    assert [(one.step, one.update) for one in traced_updates(settings_of(runs))] == [(4, 2), (4, 2)]
    assert updates_of(tmp_path / "others", "grpo", traced=False) == []


def test_the_view_has_the_numbers_of_its_tokens_in_order(tmp_path):
    (update,) = updates_of(tmp_path, "grpo", steps=2)
    (section,) = choose_sections([update])
    lines = [line for _, of_prompt in section.groups for line in of_prompt]
    texts = [text for line in lines for text, _ in line.tokens]
    assert len(lines) <= MOST_RESPONSES
    assert len(texts) == len(section.numbers["ratio"]) == len(update.tokens)
    first = update.tokens[update.tokens.prompt_text == section.groups[0][0]].sort_values(["sample", "position"])
    # The response with the most tokens that GRPO's rule clips stands by itself.
    samples = [rows for _, rows in first.groupby("sample")]
    first = pandas.concat(sorted(samples, key=lambda rows: -rows.under_grpo.isin(["low", "high"]).sum()))
    assert texts[: len(first)] == [make_visible(text) for text in first.text]
    assert section.numbers["ratio"][: len(first)] == pytest.approx(first.ratio.tolist(), rel=1e-3)
    clipped = [
        sum(classes.split(" ")[0] in ("low", "high") for line in of_prompt for _, classes in line.tokens)
        for _, of_prompt in section.groups
    ]
    assert clipped[0] == max(clipped) > 0
    many = pandas.concat([update.tokens.assign(prompt=f"p{number}") for number in range(10)], ignore_index=True)
    (section,) = choose_sections([replace(update, tokens=many)])
    assert (sum(len(of_prompt) for _, of_prompt in section.groups), section.number_of_responses) == (64, 80)
    (update,) = updates_of(tmp_path, "acpo", steps=2)
    own, grpo = (update.tokens[rule].isin(["low", "high"]).sum() for rule in ("event", "under_grpo"))
    assert choose_sections([update])[0].clipped == {"own rule": own, "GRPO": grpo} and own != grpo


def test_settings_show_the_same_prompts_those_that_any_rule_clips_first_then_those_that_learn(tmp_path):
    updates = []
    for update in updates_of(tmp_path, "grpo", "acpo", steps=2):
        rows = update.tokens.head(3).assign(event="kept", under_grpo="kept", advantage=0.0)
        prompts = [rows.assign(prompt=name, prompt_text=name) for name in "abc"]
        updates.append(replace(update, tokens=pandas.concat(prompts, ignore_index=True)))
    updates[0].tokens.loc[updates[0].tokens.prompt == "b", "advantage"] = 1.0
    updates[1].tokens.loc[8, "under_grpo"] = "low"
    sections = choose_sections(updates)
    assert [[prompt for prompt, _ in section.groups] for section in sections] == [["c", "b", "a"]] * 2


def test_what_is_drawn_of_tokens():
    texts = ("\n", " ", " a b", "", "a\tb", "\u00a0", "\u3000\n", "\f")
    assert [make_visible(text) for text in texts] == ["⏎", "␣", " a b", "∅", "a⇥b", "␣", "␣⏎", "␣"]
    tokens = pandas.DataFrame({"old_log_prob": numpy.log([0.1, 0.2, 0.5, 0.99, 1.0])})
    assert list(find_bins(tokens)) == [0, 1, 2, 4, 4]
    # Clipped tokens before others.
    found = choose_tokens(pandas.DataFrame({"event": ["kept"] * 5000 + ["low"] * 10}))
    assert len(found) == 1000 and (found.event == "low").sum() == 10
