"""What `clipx diagnose` says besides its findings: which rules were checked and what the others need, which pages say
more, and the exit code that --fail-on gives. Not covered: the findings themselves (test_rules.py), their order
(test_order.py), changes and partings (test_timeline.py).
"""

import json
from pathlib import Path

import pytest

from tests.analysis.diagnose.example_settings import make_run
from tests.analysis.runs.commands import answer, clipx
from tests.analysis.runs.example_runs import write_log
from tests.messages import assert_names
from verl_clipx.analysis.diagnose.diagnosis import keys_missing_by_rule
from verl_clipx.analysis.diagnose.rules import HELD_OUT_FALLS, ONE_UPDATE, RULES
from verl_clipx.analysis.runs import keys

SEARCH_IDLE = "bounds idle: the search never started"
FEW_TOKENS = "bounds idle: too few tokens a bin"
HELD_OUT_OF_REACH = "held target out of reach"
ANCHORED_ELSEWHERE = "ratio anchored to another policy"

ENTROPY_AND_REWARD = {keys.ENTROPY: 1.0, keys.REWARD: 0.5}
# The rules that read nothing that such a log lacks.
CHECKED_BY_ENTROPY_AND_REWARD = {
    "entropy collapse",
    "entropy explosion",
    "reward collapse",
    "reward decline",
    "values that are not finite",
    "other logged values that are not finite",
}


@pytest.mark.parametrize(
    ("clipx_node", "metrics", "also_checked", "about_its_options", "lack"),
    [
        pytest.param(
            None,
            # The gradient's norm shows skipped updates too.
            {keys.GRADIENT_NORM: 1.0, keys.RATIO: 1.001, keys.KL: 1e-5},
            {"gradient explosion", "skipped updates", ONE_UPDATE},
            set(),
            f"the run's configuration: {ANCHORED_ELSEWHERE}",
            id="without a configuration",
        ),
        pytest.param(
            {"method": "acpo", "alpha": 3.0},
            {"actor/clipx/count/bin_0": 100.0},
            {FEW_TOKENS},
            {FEW_TOKENS},
            f"val-core/*/mean@*: {HELD_OUT_FALLS}",
            id="acpo",
        ),
        pytest.param(
            {"method": "acpo", "alpha": 3.0},
            {},
            set(),
            {FEW_TOKENS},
            "this plugin's metrics (+clipx=observe clipx.receipt=auto): few prompts teach",
            id="acpo, without its metrics",
        ),
        pytest.param(
            {"method": "bapo", "target": 0.4, "hold": None},
            {},
            set(),
            {SEARCH_IDLE, "bounds saturated"},
            SEARCH_IDLE,
            id="bapo, without its metrics",
        ),
        pytest.param(
            {"method": "grpo", "hold": {"value": 0.1}},
            {},
            set(),
            {HELD_OUT_OF_REACH},
            HELD_OUT_OF_REACH,
            id="a held target, without its metric",
        ),
    ],
)
def test_the_command_says_which_rules_on_the_run_s_options_were_checked_and_what_the_others_need(
    tmp_path, clipx_node, metrics, also_checked, about_its_options, lack
):
    write_log(tmp_path / "run/metrics.jsonl", [ENTROPY_AND_REWARD | metrics] * 9)
    if clipx_node is not None:
        record = {"versions": {}, "configuration": {"clipx": clipx_node, "data": {"train_batch_size": 8}}}
        (tmp_path / "run/metrics.run.json").write_text(json.dumps(record))
    checked = CHECKED_BY_ENTROPY_AND_REWARD | also_checked
    not_checked = {rule.name for rule in RULES if not rule.about} | about_its_options
    not_checked -= checked

    content = answer("diagnose", tmp_path / "run")
    assert {*content["checked"]} == checked
    assert {*content["not_checked"]} == not_checked

    counts = f"checked {len(checked)} of {len(checked) + len(not_checked)} rules"
    verbose_output = clipx("diagnose", tmp_path / "run", "--verbose")
    assert_names(verbose_output, counts, "none fired", lack)
    assert ("the run's configuration" in verbose_output) == (clipx_node is None)

    output = clipx("diagnose", tmp_path / "run")
    assert_names(output, counts, "none fired", f"{len(not_checked)} could not be checked", "--verbose")
    assert "held-out score" not in output


def test_a_run_that_lacks_nothing_is_checked_by_all_rules():
    names = {name for rule in RULES for name in (*rule.reads, *rule.about)}
    # A metric's key has a slash, and a key of the configuration has none.
    metrics = {name.replace("*", "0"): 0.5 for name in names if "/" in name}
    configuration = {name: 1 for name in names if "/" not in name}
    run = make_run(metrics, configuration, steps=9)
    assert keys_missing_by_rule(run) == {rule.name: [] for rule in RULES}


def test_a_finding_names_a_page_that_can_be_opened(tmp_path):
    write_log(tmp_path / "run/metrics.jsonl", [{keys.ENTROPY: value} for value in [0.3] * 5 + [9.0] * 5])
    (finding,) = answer("diagnose", tmp_path / "run")["findings"]
    file, _, section = finding["page"].partition("#")
    assert finding["link"] == f"docs/{Path(file).name}"
    assert section == ""
    assert Path(file).read_text().startswith("# ")
    # The folder of the pages is named once: a path with blanks would be broken over lines otherwise.
    assert_names(clipx("diagnose", tmp_path / "run"), "docs/…", str(Path(file).parents[1]))


def test_without_a_finding_no_page_is_named(tmp_path):
    write_log(tmp_path / "run/metrics.jsonl", [{keys.ENTROPY: 0.3}] * 5)
    assert "docs/…" not in clipx("diagnose", tmp_path / "run")


@pytest.mark.parametrize(
    ("fail_on", "code", "fact"),
    [
        (["reward collapse"], 3, "1 fired"),
        (["trend"], 3, "1 fired"),
        (["remark"], 3, "1 fired"),
        (["entropy collapse", "trend"], 3, "1 fired"),
        (["fact"], 0, "1 fired"),
        (["entropy collapse"], 0, "1 fired"),
        (["truncated sampling"], 1, "can't be checked: run lacks"),
        (["reward"], 1, "must be one of fact; trend; remark"),
    ],
)
def test_fail_on_gives_exit_code_3_for_a_finding_of_a_named_rule_or_of_a_named_or_graver_kind(
    tmp_path, fail_on, code, fact
):
    # Its one finding is a collapse of the reward, which is a trend.
    rows = [{keys.ENTROPY: 1.0, keys.REWARD: 0.5}] * 9 + [{keys.ENTROPY: 1.0, keys.REWARD: 0.0}] * 9
    write_log(tmp_path / "run/metrics.jsonl", rows)
    options = []
    for name in fail_on:
        options += ["--fail-on", name]
    assert_names(clipx("diagnose", tmp_path / "run", *options, code=code), fact)
