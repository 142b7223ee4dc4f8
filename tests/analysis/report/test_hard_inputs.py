"""Logs, traces and outputs that are empty, not finite or closed: a command says what is wrong, and never a traceback.
Covers: diagnose, replay, report; skipped updates, counted, and by the gradient norm in old logs; formulas. Not covered:
how the worker counts them (tests/training/worker), the contents of healthy runs.
"""

import json
import re
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import verl

from tests.analysis.diagnose.example_settings import collect_findings
from tests.analysis.runs.commands import answer, clipx, page_of
from tests.analysis.runs.example_runs import WHOLE_UPDATE, read_columns, write_log, write_run
from tests.messages import assert_names
from verl_clipx.analysis.replay.traced_numbers import numbers_of_step
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.common.files import no_formula
from verl_clipx.run.trace_format import Shard, shards_in, write_shard
from verl_clipx.training.trainer.log import write_record

NAN = float("nan")
INF = float("inf")
# Each rollout batch gets eight updates.
CONFIGURATION = {
    "clipx": {"method": "acpo"},
    "data": {"seed": 1, "train_batch_size": 64},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1, "strategy": "fsdp2"}},
}
# A step's metrics while nothing moves the policy.
POLICY_STAYS = {
    keys.REWARD: 0.5,
    keys.ENTROPY: 1.0,
    keys.KL: 0.0,
    keys.RATIO: 1.0,
    keys.GRADIENT_NORM: 0.3,
    keys.CLIPPED_LOW: 0.0,
    keys.CLIPPED_HIGH: 0.0,
}
POLICY_MOVES = POLICY_STAYS | {keys.RATIO: 1.01}
ALL_REWARDS_0 = {keys.REWARD: 0.0, keys.GRADIENT_NORM: 0.0, keys.LOWEST_ADVANTAGE: 0.0, keys.HIGHEST_ADVANTAGE: 0.0}


def write_steps(folder, rows, configuration=CONFIGURATION):
    """Write a run of steps that differ from POLICY_STAYS by these metrics."""
    log = write_log(folder / "metrics.jsonl", [POLICY_STAYS | row for row in rows])
    if configuration:
        write_record(log, configuration)
    return folder


def find_in(*folders):
    """Return the findings on runs."""
    return collect_findings(settings_of([read_run(folder) for folder in folders]))


def advises_mini_batch(findings) -> bool:
    return any("mini_batch" in finding.text for finding in findings)


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_a_log_without_a_finite_number_is_not_called_healthy(tmp_path, value):
    row = {keys.ENTROPY: value, keys.REWARD: value, keys.RATIO: value}
    output = clipx("diagnose", write_log(tmp_path / "metrics.jsonl", [row] * 20))
    assert_names(output, "values that are not finite")
    assert "none fired" not in output


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_a_learning_rate_that_is_not_finite_is_found(tmp_path, value):
    log = write_log(tmp_path / "metrics.jsonl", [{"actor/lr": value}] * 20)
    assert_names(clipx("diagnose", log), "values that are not finite from step 1 on", "actor/lr in 20 steps")


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_of_a_log_that_has_a_receipt_of_nothing_alone_nothing_can_be_said(tmp_path, value):
    # The receipt's NaN says that nothing was compared.
    log = write_log(tmp_path / "metrics.jsonl", [{keys.RECEIPT: value}] * 20)
    assert_names(clipx("diagnose", log, "--json", code=1), "no metric", "finite number")


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_a_rule_whose_metric_is_never_finite_is_not_among_the_checked(tmp_path, value):
    def list_checked(name, reward):
        log = write_log(tmp_path / name, [{keys.ENTROPY: 0.5, keys.REWARD: reward}] * 20)
        return answer("diagnose", log)["checked"]

    assert "reward collapse" in list_checked("finite.jsonl", 0.5)
    assert "reward collapse" not in list_checked("not_finite.jsonl", value)


OF_TRAINING = "values that are not finite"
OTHER = "other logged values that are not finite"


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("actor/kl_loss", OF_TRAINING),
        ("actor/lr", OF_TRAINING),
        ("actor/x", OF_TRAINING),
        ("critic/vf_loss", OF_TRAINING),
        ("rollout_corr/kl", OTHER),
        ("response_length/max", OTHER),
        ("val-core/math/acc/mean@8", OTHER),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF, None])
def test_whatever_is_logged_as_no_finite_number_is_said(tmp_path, key, rule, value):
    rows = [POLICY_MOVES | {key: 0.1}] * 12 + [POLICY_MOVES | {key: value}] * 28
    (finding,) = answer("diagnose", write_log(tmp_path / "metrics.jsonl", rows))["findings"]
    assert finding["finding"] == rule
    assert finding["onset"] == 13
    assert_names(finding["evidence"], f"not finite: {key} in 28 steps")


def test_of_many_values_that_are_not_finite_the_first_causes_are_named(tmp_path):
    not_finite = {f"actor/metric_{number}": NAN for number in range(9)} | {keys.REWARD: NAN, keys.ENTROPY: NAN}
    log = write_log(tmp_path / "metrics.jsonl", [POLICY_MOVES, POLICY_MOVES | not_finite])
    (finding,) = answer("diagnose", log)["findings"]
    named = [key for key in re.findall(r"(\S+) in 1 step", finding["evidence"])]
    assert named[:3] == [keys.REWARD, keys.ENTROPY, "actor/metric_0"]
    assert_names(finding["evidence"], "5 more")


def test_skipped_updates_come_first_with_their_number(tmp_path):
    rows = [{keys.SKIPPED_UPDATES: skipped} for skipped in (0.0, 6.0, 8.0, 4.0)]
    findings = find_in(write_steps(tmp_path / "run", rows))
    assert findings[0].head == "ACPO, seed 1: skipped updates from step 2 on."
    # Of the three steps since the first that skipped any, with 8 updates each.
    assert_names(findings[0].text, "18 of 24 updates skipped since", "The policy stayed as it was")
    assert not advises_mini_batch(findings)


def test_a_smaller_mini_batch_is_advised_only_where_a_rollout_batch_gets_one_update(tmp_path):
    eight_updates = write_steps(tmp_path / "eight", [ALL_REWARDS_0] * 3)
    assert not advises_mini_batch(find_in(eight_updates))
    configuration = CONFIGURATION | {"data": {"seed": 1, "train_batch_size": 8}}
    one_update = write_steps(tmp_path / "one", [{keys.SKIPPED_UPDATES: 0.0}] * 3, configuration)
    assert advises_mini_batch(find_in(one_update))


@pytest.mark.parametrize(
    "configuration",
    [{}, {"clipx": {"method": "acpo"}}, {"data": {"train_batch_size": 0}}],
    ids=["none", "a method alone", "no prompts"],
)
def test_without_the_number_of_updates_skipped_ones_are_counted_alone(tmp_path, configuration):
    rows = [{keys.SKIPPED_UPDATES: 1.0}, {keys.SKIPPED_UPDATES: 0.0}]
    text = find_in(write_steps(tmp_path / "run", rows, configuration))[0].text
    assert_names(text, "1 update skipped or taken, depending on the engine", "If skipped, the policy stayed")


def test_an_infinite_number_of_skipped_updates_is_a_finding(tmp_path):
    log = write_log(tmp_path / "metrics.jsonl", [{keys.SKIPPED_UPDATES: INF, keys.ENTROPY: 0.5}] * 12)
    assert_names(clipx("diagnose", log), "skipped updates")


@pytest.mark.parametrize("row", [{keys.SKIPPED_UPDATES: 1.0}, {keys.GRADIENT_NORM: NAN}])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "veomni", "torchtitan", "automodel", "megatron"])
def test_what_became_of_a_step_without_a_finite_gradient_is_said_by_engine(tmp_path, row, strategy):
    # Of verl 0.9.1's engines only Megatron's looks at no norm before it steps.
    skips = strategy != "megatron"
    engine = Path(verl.__file__).parent / "workers/engine" / strategy.removesuffix("2") / "transformer_impl.py"
    assert ("grad_norm is not finite" in engine.read_text()) == skips
    configuration = CONFIGURATION | {"actor_rollout_ref": {"actor": {"strategy": strategy}}}
    finding = find_in(write_steps(tmp_path / "run", [{}, row], configuration))[0]
    if skips:
        assert "updates taken with a gradient that is not finite" not in finding.head
        assert_names(finding.text, "skipped", "policy stayed as it was")
    else:
        assert_names(finding.head, "updates taken with a gradient that is not finite")
        assert_names(finding.text, "taken")
        assert "policy stayed as it was" not in finding.text


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_in_older_logs_the_gradient_norm_shows_skipped_updates(tmp_path, value):
    rows = [{}, {keys.GRADIENT_NORM: value}] * 2
    first, *others = find_in(write_steps(tmp_path / "run", rows))
    assert first.head == "ACPO, seed 1: skipped updates from step 2 on."
    assert_names(first.text, "updates skipped in 2 of 3 steps since")
    # What is not finite are the skipped updates.
    assert not any("not finite" in finding.head for finding in others)
    assert not advises_mini_batch(others)


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_the_gradient_norm_shows_no_skipped_updates_where_these_are_logged(tmp_path, value):
    rows = [{keys.SKIPPED_UPDATES: 0.0}, {keys.SKIPPED_UPDATES: 0.0, keys.GRADIENT_NORM: value}] * 2
    findings = find_in(write_steps(tmp_path / "run", rows))
    assert not any("skipped" in finding.head for finding in findings)
    assert any(f"not finite: {keys.GRADIENT_NORM} in 2 steps" in finding.text for finding in findings)


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
def test_rewards_that_are_not_finite_are_named_counted_and_left_out(tmp_path, value):
    rows = [{keys.REWARD: reward, "actor/pg_loss": value} for reward in (0.2, value, 0.4, value)]
    with_acpo = write_steps(tmp_path / "mine", rows)
    with_grpo = write_steps(tmp_path / "theirs", [{}] * 4, {"clipx": {"method": "grpo"}})
    findings = find_in(with_acpo, with_grpo)
    assert findings[0].head == "ACPO, seed 1: values that are not finite from step 1 on."
    whole_text = "\n".join(f"{finding.head} {finding.text}" for finding in findings)
    assert whole_text.count(f"{keys.REWARD} in 2 steps") == 1
    assert whole_text.count("actor/pg_loss in 4 steps") == 1
    (of_rewards,) = [finding for finding in findings if finding.head.startswith("The training reward")]
    assert_names(of_rewards.head, "0.500 in GRPO", "0.300 in ACPO, seed 1")
    assert_names(of_rewards.text, "over 2 steps")


def write_validation_by_hand(folder, step, scores):
    """Write a validation whose scores are texts of JSON, which need be no numbers."""
    folder.mkdir(exist_ok=True)
    lines = [f'{{"input": "{problem}", "score": {score}}}\n' for problem, score in enumerate(scores)]
    (folder / f"{step}.jsonl").write_text("".join(lines))


def test_the_page_says_what_is_not_finite_first_and_its_table_keeps_what_is(tmp_path):
    rewards = (-0.2, NAN, 0.4, None)
    rows = [{keys.REWARD: reward, keys.SKIPPED_UPDATES: 2.0} for reward in rewards]
    run = write_steps(tmp_path / "=mine", rows)
    write_validation_by_hand(run / "validation", 0, ["0", "1"] * 4)
    write_validation_by_hand(run / "validation", 2, ["null"] + ["NaN"] * 7)
    assert any(f"{keys.HELD_OUT} in 1 step" in finding.text for finding in find_in(run))
    clipx("report", run, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert '<h1>ACPO, seed 1: skipped updates from step 1 on</h1>\n<p class="news">8 of 32 updates' in page
    assert "ACPO, seed 1: values that are not finite from step" in page
    assert ">nan<" not in page
    table = pandas.read_csv(tmp_path / "out" / "metrics.csv")
    assert table[keys.REWARD].notna().tolist() == [True, False, True, False]
    # A name that begins like a formula becomes a text, and a negative number stays one.
    assert set(table["run"]) == {"'=mine"}
    assert table[keys.REWARD].min() == -0.2


@pytest.mark.parametrize("text", ["=1+1", "+1", "-x", "@SUM(A1)", "\tx", "\rx"])
def test_a_text_that_a_table_would_compute_is_quoted(text):
    assert no_formula(text) == f"'{text}"


def test_a_text_that_begins_with_a_digit_is_not_quoted():
    assert no_formula("1+1") == "1+1"


@pytest.fixture(scope="module", params=["acpo", "bapo", "dgpo"])
def logged_rows(request, tmp_path_factory):
    """The metrics that a run of a method logs in each of three steps."""
    run = write_run(tmp_path_factory.mktemp(request.param) / "run", request.param, traced=False, steps=3)
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_damaged(run, rows, *, metrics, steps, value):
    """Write a log whose metrics have another value in some steps."""
    damaged_rows = []
    for step, row in enumerate(rows, 1):
        damage = dict.fromkeys(metrics, value) if step in steps else {}
        damaged_rows.append(row | damage)
    write_log(run / "metrics.jsonl", damaged_rows)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{2}, {1, 2, 3}], ids=["in one step", "in all steps"])
def test_no_metric_that_is_not_finite_breaks_a_sentence(tmp_path, logged_rows, steps):
    for number, metric in enumerate(sorted(logged_rows[0])):
        write_damaged(tmp_path, logged_rows, metrics=[metric], steps=steps, value=NAN if number % 2 else None)
        for finding in find_in(tmp_path):
            assert "nan" not in f"{finding.head} {finding.text}".lower(), metric


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damaged", "steps"),
    [
        pytest.param(slice(0, None, 2), {2}, id="every other metric in one step"),
        pytest.param(slice(1, None, 2), {2}, id="the others in one step"),
        pytest.param(slice(None), {1, 2, 3}, id="all metrics in all steps"),
    ],
)
def test_no_metrics_that_are_not_finite_break_a_figure(tmp_path, logged_rows, damaged, steps):
    metrics = sorted(logged_rows[0])[damaged]
    write_damaged(tmp_path / "run", logged_rows, metrics=metrics, steps=steps, value=NAN)
    clipx("report", tmp_path / "run", "--out", tmp_path / "out")


@pytest.mark.slow
def test_traced_tokens_that_are_not_finite_do_not_break_the_page(tmp_path):
    run = write_run(tmp_path / "run", "acpo", steps=2)
    last = shards_in(run / "traces")[-1]
    columns = read_columns(run / "traces", last)
    for name in ("advantage", "score", "ratio", "weight", "high", "log_prob", "old_log_prob", "entropy"):
        every_seventh = columns[name][::7]
        columns[name][::7] = [NAN] * len(every_seventh)
    write_shard(run / "traces", Shard(last.step, last.update + 1, 0), columns, WHOLE_UPDATE)
    clipx("report", run, "--out", tmp_path / "out")
    data = page_of(tmp_path / "out").split('id="data">')[1].split("</script>")[0]
    assert not re.search(r"\bNaN\b", data)
    assert json.loads(data)


@pytest.mark.parametrize("update", [0, 1, "the last"])
def test_a_step_without_the_files_of_an_update_is_not_called_exact(tmp_path, update):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    files = sorted((run / "traces").iterdir())
    if update == "the last":
        update = len(files) - 1
        # Nothing but the record tells that there was one more.
        record = json.loads((run / "metrics.run.json").read_text())
        record["schedule"]["updates"] = len(files)
        (run / "metrics.run.json").write_text(json.dumps(record))
    assert answer("replay", run, "+clipx=acpo")["exact"]
    files[update].unlink()
    assert not answer("replay", run, "+clipx=acpo")["exact"]
    _, is_whole = numbers_of_step(read_run(run), 2)
    assert not is_whole


def rewrite_tables(run, edit):
    """Write each file of a run's traces anew, with what `edit` makes of its table."""
    for path in (run / "traces").iterdir():
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(edit(table).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("rows", [0, 1])
def test_traces_of_hardly_any_rows_are_replayed_or_refused_and_drawn(tmp_path, rows):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    rewrite_tables(run, lambda table: table.slice(0, rows))
    if rows == 0:
        refusal = clipx("replay", run, "+clipx=dapo", "+clipx=bapo", code=1)
        assert_names(refusal, "no traced update", "only finite numbers")
    else:
        clipx("replay", run, "+clipx=dapo", "+clipx=bapo")
    clipx("report", run, "--out", tmp_path / "page")


@pytest.mark.parametrize(("log_prob", "old_log_prob"), [(-1e30, -1e30), (0.0, 800.0), (0.0, -3e38), (3e38, -3e38)])
def test_extreme_log_probabilities_are_replayed(tmp_path, log_prob, old_log_prob):
    def set_log_probs(table):
        for name, value in (("log_prob", log_prob), ("old_log_prob", old_log_prob)):
            field = table.schema.field(name)
            values = pyarrow.array([value] * len(table), field.type)
            table = table.set_column(table.schema.get_field_index(name), field, values)
        return table

    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    rewrite_tables(run, set_log_probs)
    clipx("replay", run, "+clipx=dapo")
