"""Logs, traces and outputs that are empty, not finite or closed: a command says what is wrong, and never a traceback.
Covers: diagnose, replay, report and check-loss; skipped updates, counted and by the gradient norm in old logs;
formulas. Not covered: how the worker counts them (tests/training/worker), the contents of healthy runs.
"""

import json
import re
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import verl

from tests.analysis.diagnose.test_findings import findings
from tests.analysis.runs.commands import answer, clipx, page_of
from tests.analysis.runs.example_runs import WHOLE, read_columns, write_log, write_run
from verl_clipx.analysis.replay.traced_numbers import numbers_of_step
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.settings import settings_of
from verl_clipx.common.files import no_formula
from verl_clipx.run.trace_format import Shard, shards_in, write_shard
from verl_clipx.training.trainer.log import write_record

NAN, INF = float("nan"), float("inf")
CONFIGURATION = {
    "clipx": {"method": "acpo"},
    "data": {"seed": 1, "train_batch_size": 64},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1, "strategy": "fsdp2"}},
}
# A step's metrics while no update is taken: the ratio stays 1.
STILL = {keys.REWARD: 0.5, keys.ENTROPY: 1.0, keys.KL: 0.0, keys.RATIO: 1.0, keys.GRADIENT_NORM: 0.3}
STILL |= {keys.CLIPPED_LOW: 0.0, keys.CLIPPED_HIGH: 0.0}
# All rewards are 0.
DEAD = {keys.REWARD: 0.0, keys.GRADIENT_NORM: 0.0, keys.LOWEST_ADVANTAGE: 0.0, keys.HIGHEST_ADVANTAGE: 0.0}


def write(folder, rows, configuration=CONFIGURATION):
    """A run of steps that differ from STILL by these metrics."""
    log = write_log(folder / "metrics.jsonl", [STILL | row for row in rows])
    if configuration:
        write_record(log, configuration)
    return folder


def said_of(*folders):
    return findings(settings_of([read_run(folder) for folder in folders]))


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_a_log_without_a_finite_number_is_not_called_healthy(tmp_path, value):
    row = {keys.ENTROPY: value, keys.REWARD: value, keys.RATIO: value}
    text = clipx("diagnose", write_log(tmp_path / "metrics.jsonl", [row] * 20))
    assert "values that are not finite" in text and "none fired" not in text
    other = write_log(tmp_path / "other.jsonl", [{"actor/lr": value}] * 20)
    assert "values that are not finite from step 1 on. not finite: actor/lr in 20 steps." in clipx("diagnose", other)
    # The receipt's NaN says that nothing was compared.
    nothing = write_log(tmp_path / "nothing.jsonl", [{keys.RECEIPT: value}] * 20)
    assert "no metric in its log has a finite number" in clipx("diagnose", nothing, "--json", code=1)
    # Nor is a rule whose metric is never finite among the judged.
    finite, mixed = (
        clipx("diagnose", write_log(tmp_path / f"{one}.jsonl", [{keys.ENTROPY: 0.5, keys.REWARD: one}] * 20))
        for one in (0.5, value)
    )
    assert finite.split(" rules")[0] != mixed.split(" rules")[0]


@pytest.mark.parametrize(
    ("key", "finding"),
    [
        *((key, "values that are not finite") for key in ("actor/kl_loss", "actor/lr", "critic/vf_loss", "actor/x")),
        *((key, "other logged values that are not finite") for key in ("rollout_corr/kl", "response_length/max")),
        ("val-core/math/acc/mean@8", "other logged values that are not finite"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF, None])
def test_whatever_is_logged_as_no_finite_number_is_said(tmp_path, key, finding, value):
    rows = [STILL | {keys.RATIO: 1.01, key: 0.1 if step < 12 else value} for step in range(40)]
    (found,) = answer("diagnose", write_log(tmp_path / "metrics.jsonl", rows))["findings"]
    assert (found["finding"], found["onset"]) == (finding, 13)
    assert found["evidence"] == f"not finite: {key} in 28 steps"


def test_of_many_values_that_are_not_finite_the_first_causes_are_named(tmp_path):
    moving = STILL | {keys.RATIO: 1.01}
    broken = {f"actor/metric_{number}": NAN for number in range(9)} | {keys.REWARD: NAN, keys.ENTROPY: NAN}
    (found,) = answer("diagnose", write_log(tmp_path / "metrics.jsonl", [moving, moving | broken]))["findings"]
    named = f"not finite: {keys.REWARD} in 1 step; {keys.ENTROPY} in 1 step; actor/metric_0 in 1 step"
    assert found["evidence"].startswith(named) and found["evidence"].endswith("and 5 more")


def test_skipped_updates_come_first_and_no_smaller_mini_batch_is_advised(tmp_path):
    first, *others = said_of(write(tmp_path / "mine", [{keys.SKIPPED_UPDATES: float(n)} for n in (0, 6, 8, 4)]))
    # Of the three steps since the first that skipped any, 8 updates each.
    assert first.head == "ACPO, seed 1: skipped updates from step 2 on."
    assert "18 of 24 updates skipped since." in first.text and "The policy stayed as it was" in first.text
    assert not any("mini_batch" in one.text for one in (first, *others))
    # Nor where nothing moves the policy although each rollout batch has eight updates; only where it has one.
    assert not any("mini_batch" in one.text for one in said_of(write(tmp_path / "still", [DEAD] * 3)))
    single = {**CONFIGURATION, "data": {"seed": 1, "train_batch_size": 8}}
    healthy = write(tmp_path / "healthy", [{keys.SKIPPED_UPDATES: 0.0}] * 3, single)
    assert any("mini_batch" in one.text for one in said_of(healthy))
    skipped = [{keys.SKIPPED_UPDATES: 1.0}, {keys.SKIPPED_UPDATES: 0.0}]
    for index, configuration in enumerate(({}, {"clipx": {"method": "acpo"}}, {"data": {"train_batch_size": 0}})):
        run = write(tmp_path / f"of-{index}-known", skipped, configuration)
        said = "1 update skipped or taken, depending on the engine, since. If skipped, the policy stayed"
        assert said_of(run)[0].text.startswith(said)
    endless = write_log(tmp_path / "endless.jsonl", [{keys.SKIPPED_UPDATES: INF, keys.ENTROPY: 0.5}] * 12)
    assert "skipped updates" in clipx("diagnose", endless)


@pytest.mark.parametrize("row", [{keys.SKIPPED_UPDATES: 1.0}, {keys.GRADIENT_NORM: NAN}])
@pytest.mark.parametrize(
    ("strategy", "fate", "stayed"),
    [(name, "skipped", True) for name in ("fsdp", "fsdp2", "veomni", "torchtitan", "automodel")]
    + [("megatron", "taken", False)],
)
def test_what_became_of_a_step_without_a_finite_gradient_is_said_by_engine(tmp_path, row, strategy, fate, stayed):
    # Of verl 0.9.1's engines only Megatron's looks at no norm before it steps.
    engine = Path(verl.__file__).parent / "workers/engine" / strategy.removesuffix("2") / "transformer_impl.py"
    assert ("grad_norm is not finite" in engine.read_text()) == stayed
    configuration = {**CONFIGURATION, "actor_rollout_ref": {"actor": {"strategy": strategy}}}
    first = said_of(write(tmp_path / "mine", [{}, row], configuration))[0]
    assert f" {fate} " in first.text and ("he policy stayed as it was" in first.text) == stayed
    assert ("updates taken with a gradient that is not finite" in first.head) != stayed


@pytest.mark.parametrize("value", [NAN, INF, None])
def test_in_older_logs_the_gradient_norm_is_the_evidence(tmp_path, value):
    rows = [{}, {keys.GRADIENT_NORM: value}] * 2
    first, *others = said_of(write(tmp_path / "mine", rows))
    assert first.head == "ACPO, seed 1: skipped updates from step 2 on."
    assert first.text.startswith("updates skipped in 2 of 3 steps since")
    # The skipped updates are these values.
    assert not any("not finite" in one.head or "mini_batch" in one.text for one in others)
    zero = [{**one, keys.SKIPPED_UPDATES: 0.0} for one in rows]
    counted = said_of(write(tmp_path / "counted", zero))
    assert not any("skipped" in one.head for one in counted)
    assert any(f"not finite: {keys.GRADIENT_NORM} in 2 steps" in one.text for one in counted)


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
def test_rewards_that_are_not_finite_are_named_counted_and_left_out(tmp_path, value):
    rows = [{keys.REWARD: reward, "actor/pg_loss": value} for reward in (0.2, value, 0.4, value)]
    theirs = write(tmp_path / "theirs", [{}] * 4, {"clipx": {"method": "grpo"}})
    found = said_of(write(tmp_path / "mine", rows), theirs)
    assert found[0].head == "ACPO, seed 1: values that are not finite from step 1 on."
    texts = "\n".join(f"{one.head} {one.text}" for one in found)
    assert texts.count(f"{keys.REWARD} in 2 steps") == texts.count("actor/pg_loss in 4 steps") == 1
    (of_rewards,) = [one for one in found if one.head.startswith("The training reward")]
    assert of_rewards.head == "The training reward was 0.500 in GRPO and 0.300 in ACPO, seed 1."
    assert "Means over 2 steps" in of_rewards.text


def test_the_page_says_so_first_and_its_table_keeps_what_is_finite(tmp_path):
    rows = [{keys.REWARD: reward, keys.SKIPPED_UPDATES: 2.0} for reward in (-0.2, NAN, 0.4, None)]
    run = write(tmp_path / "=mine", rows)
    (run / "validation").mkdir()
    scores = {0: [str(i % 2) for i in range(8)], 2: ["null"] + ["NaN"] * 7}
    for step, of_step in scores.items():
        lines = [f'{{"input": "{i}", "score": {score}}}\n' for i, score in enumerate(of_step)]
        (run / "validation" / f"{step}.jsonl").write_text("".join(lines))
    assert any(f"{keys.HELD_OUT} in 1 step" in one.text for one in said_of(run))
    clipx("report", run, "--out", tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert '<h1>ACPO, seed 1: skipped updates from step 1 on</h1>\n<p class="news">8 of 32 updates' in page
    assert "ACPO, seed 1: values that are not finite from step" in page and ">nan<" not in page
    table = pandas.read_csv(tmp_path / "out" / "metrics.csv")
    assert table[keys.REWARD].notna().tolist() == [True, False, True, False]
    # No text is a formula, and a negative number is one.
    assert set(table["run"]) == {"'=mine"} and table[keys.REWARD].min() == -0.2
    texts = ["=1+1", "+1", "-x", "@SUM(A1)", "\tx", "\rx"]
    assert [no_formula(text) for text in [*texts, "1+1"]] == [*(f"'{text}" for text in texts), "1+1"]


@pytest.mark.slow
def test_no_series_breaks_sentences_or_figures(tmp_path):
    """Each series in turn, at one step and at all; in figures, which leave a series out, half of them, and all."""
    seen = set()
    for method in ("acpo", "bapo", "dgpo"):
        run = write_run(tmp_path / method, method, traced=False, steps=3)
        rows = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        names = sorted({name for row in rows for name in row})

        def damage(chosen, steps, value, run=run, rows=rows):
            damaged = dict.fromkeys(chosen, value)
            write_log(run / "metrics.jsonl", [row | (damaged if at in steps else {}) for at, row in enumerate(rows, 1)])

        for steps in ({2}, {1, 2, 3}):
            # Those that every method logs once.
            for name in [name for name in names if name not in seen]:
                damage([name], steps, NAN if len(name) % 2 else None)
                assert all("nan" not in f"{one.head} {one.text}".lower() for one in said_of(run)), (name, steps)
            for chosen in (names[::2], names[1::2]) if len(steps) == 1 and not seen else (names,):
                damage(chosen, steps, NAN)
                clipx("report", run, "--out", tmp_path / "out")
        seen.update(names)


@pytest.mark.slow
def test_traced_tokens_that_are_not_finite_do_not_break_the_page(tmp_path):
    run = write_run(tmp_path / "run", "acpo", steps=2)
    last = shards_in(run / "traces")[-1]
    columns = read_columns(run / "traces", last)
    for name in ("advantage", "score", "ratio", "weight", "high", "log_prob", "old_log_prob", "entropy"):
        columns[name][::7] = [NAN] * len(columns[name][::7])
    write_shard(run / "traces", Shard(last.step, last.update + 1, 0), columns, WHOLE)
    clipx("report", run, "--out", tmp_path / "out")
    data = page_of(tmp_path / "out").split('id="data">')[1].split("</script>")[0]
    assert not re.search(r"\bNaN\b", data) and json.loads(data)


@pytest.mark.parametrize("update", [0, 1, "the last"])
def test_a_step_without_the_files_of_an_update_is_not_called_exact(tmp_path, update):
    run = write_run(tmp_path / "grpo-seed1", "grpo", steps=2)
    updates = sorted((run / "traces").iterdir())
    if update == "the last":
        # Nothing but the record tells that there was one more.
        record = json.loads((run / "metrics.run.json").read_text())
        record["schedule"]["updates"] = len(updates)
        (run / "metrics.run.json").write_text(json.dumps(record))
    assert '"exact": true' in clipx("replay", run, "+clipx=acpo", "--json")
    updates[-1 if update == "the last" else update].unlink()
    assert '"exact": false' in clipx("replay", run, "+clipx=acpo", "--json")
    assert not numbers_of_step(read_run(run), 2)[1]


def change(run, changed):
    for path in (run / "traces").iterdir():
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(changed(table).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize("rows", [0, 1])
def test_traces_of_hardly_any_rows(tmp_path, rows):
    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    change(run, lambda table: table.slice(0, rows))
    text = clipx("replay", run, "+clipx=dapo", "+clipx=bapo", code=0 if rows else 1)
    assert rows or "no traced update has tokens with only finite numbers" in text
    clipx("report", run, "--out", tmp_path / "page")


@pytest.mark.parametrize(("now", "old"), [(-1e30, -1e30), (0.0, 800.0), (0.0, -3e38), (3e38, -3e38)])
def test_extreme_log_probabilities(tmp_path, now, old):
    def filled(table):
        for name, value in (("log_prob", now), ("old_log_prob", old)):
            place, field = table.schema.get_field_index(name), table.schema.field(name)
            table = table.set_column(place, field, pyarrow.array([value] * len(table), field.type))
        return table

    run = write_run(tmp_path / "acpo-seed1", "acpo", steps=2)
    change(run, filled)
    clipx("replay", run, "+clipx=dapo")
