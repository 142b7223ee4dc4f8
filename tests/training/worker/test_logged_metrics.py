"""Which metrics are logged: those of `clipx metrics` and docs/metrics.md and no others, each once, exact over splits.
Covers every method with its defaults and verl's own losses under +clipx=observe. Not covered: what a rollout batch adds
(tests/losses/applying/test_metrics.py), what is logged ELSEWHERE, the engine (tests/end_to_end).
"""

import fnmatch
import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from verl.workers.utils.losses import ppo_loss

from tests import example_losses
from tests.claims.documents import inline_code_of
from tests.losses.methods.against_verl import ragged
from tests.training.worker import updates
from tests.training.worker.updates import WHOLE, aggregate_metrics
from verl_clipx.analysis.demo.files import SHIPPED
from verl_clipx.analysis.diagnose.rules import RULES
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.cli import app
from verl_clipx.losses.applying.metric_listing import LISTS, markdown_table
from verl_clipx.losses.applying.metrics import (
    add_metrics_over_updates,
    merge_metrics_of_passes,
    replace_sums_with_metrics,
)
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run.schedule import Schedule
from verl_clipx.training.worker.loss_function import with_micro_batch
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.step import OptimizerStep

# Overrides by which the search moves a bound, tokens are clipped on both sides, and some sequences are not.
OVERRIDES_OF_METHODS = {
    "bapo": ("clipx.target=0.9",),
    "acpo": ("clipx.alpha=0.5",),
    "kl_cov": ("clipx.share=0.3",),
    "gspo": ("clipx.clip_low=0.95", "clipx.clip_high=1.05"),
}
SPLITS = [*updates.SPLITS.values(), [[[4, 5]], [[0, 1]], [[2, 3]]]]
SELECTED_IN_MINI_BATCH = ("+clipx/select=high_entropy", "clipx.select.over=mini_batch")
LOG_PROBS_RETURNED = "actor_rollout_ref.rollout.calculate_log_probs=True"
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def random_batch(seed):
    """Sequences of unlike lengths whose tokens are in every region."""
    batch = ragged(seed, spread=0.5, sequences=6, length=40)
    generator = torch.Generator().manual_seed(seed)
    noise, entropy = torch.rand(2, 6, 40, generator=generator, dtype=torch.float64)
    return batch | {
        "mask": batch.pop("response_mask"),
        "sampler_log_prob": batch["old_log_prob"] + 0.1 * noise,
        "entropy": entropy,
    }


def log_update(actor, group, split=WHOLE, seed=0, overrides=(), loss_mode="vanilla", at_ratio_one=False):
    """What a worker logs of one optimizer step.

    Args:
        actor, group, split, seed, overrides: the configuration and the mini-batch.
        loss_mode: the loss of verl's that is observed.
        at_ratio_one: whether the step is taken for one whose sums are the floor.
    """
    needed = [LOG_PROBS_RETURNED]
    if group == "observe":
        needed = [f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"]
        observe_registered(loss_mode)
    config = actor(f"+clipx={group}", *needed, *OVERRIDES_OF_METHODS.get(group, ()), *overrides)
    batch = random_batch(seed)
    step = OptimizerStep(at_ratio_one=at_ratio_one)
    function = with_micro_batch(partial(ppo_loss, config=config), config.policy_loss.clipx, Schedule(), lambda: step)
    lists = {name: [value] for name, value in aggregate_metrics(function, batch, split).items()}
    return {name: values[0] for name, values in replace_sums_with_metrics(lists).items()}


def patterns_in(text):
    """The keys that a text names, as patterns: `…` and `bin_0` stand for what may follow."""
    patterns = [re.escape(code).replace("…", ".+") for code in inline_code_of(text)]
    return [re.compile(re.sub(r"(bin_)\d+", r"\1\\d+", pattern)) for pattern in patterns]


@pytest.mark.slow
@pytest.mark.parametrize("group", [*BUILT_IN, "observe"])
def test_every_key_is_in_the_document_no_two_are_equal_and_they_are_few(actor, group):
    batches = [log_update(actor, group, seed=seed) for seed in range(4)]
    logged_values = {}
    for name in batches[0]:
        if name.startswith(("clipx/", "actor/ppo_kl", "actor/pg_clipfrac")):
            logged_values[name] = [batch[name] for batch in batches]
    names_without_bins = sorted(name for name in logged_values if not re.search(r"/bin_\d+$", name))
    assert len(names_without_bins) <= 20, f"{group} logs more than 20 metrics: {', '.join(names_without_bins)}"
    patterns = patterns_in("\n\n".join([DOCUMENT.read_text(encoding="utf-8"), *map(markdown_table, LISTS)]))
    for name in logged_values:
        key = name.removeprefix("actor/")
        assert any(pattern.fullmatch(key) for pattern in patterns), f"{key} is not in the document"
        assert not name.startswith("clipx_sum/") and "max" not in name and "min" not in name
    # A method with a hard clip, or without a bound, keeps metrics that all have at 0. What verl's own loss logs beside
    # the exact metrics is verl's, and its clip fractions are those of the regions where its clip is PPO's.
    values = {name: value for name, value in logged_values.items() if any(value)}
    if group == "observe":
        values = {name: value for name, value in values.items() if name.startswith("clipx/") and "region" not in name}
    if group == "p3o":
        # It has an upper bound alone, and verl's fraction is of both sides; its cap is the effective sample size.
        del values["actor/pg_clipfrac"], values["clipx/ratio_cap"]
    for first, second in itertools.combinations(values, 2):
        assert values[first] != pytest.approx(values[second], rel=1e-9), f"{first} and {second} are always equal"


# What neither a loss nor a rollout batch logs: the receipt's, the worker's, and those of the trainer's process.
ELSEWHERE = {
    "clipx/receipt",
    "clipx/receipt_failed",
    "clipx/rejected_fraction",
    "clipx/skipped_updates",
    "clipx/staleness/versions",
    "clipx/staleness/versions_first",
    "clipx/not_finite/log_probs",
    "clipx/not_finite/rank",
    "critic/score/standard_error",
    "health/not_finite/rewards",
    "health/not_finite/advantages",
    "health/not_finite/log_probs",
    "health/alike_prompts",
    "health/undecided",
    "health/cut_responses",
    # Measured before the first update: tests/training/worker/test_floor.py.
    "clipx/floor_recut/log_ratio",
    "clipx/floor_recut/clip_fraction_low",
    "clipx/floor_recut/clip_fraction_high",
    "clipx/floor_recut/tokens/bin_0",
    "clipx/floor_recut/log_ratio_sum/bin_0",
    "clipx/floor_recut/squared_sum/bin_0",
}


def keys_logged_by_runs(actor):
    """Every key that some run logs of the plugin's, without the beginning that verl gives it."""
    # Selection over the mini-batch, by the threshold of each micro-batch where no pass found one.
    keys = {*ELSEWHERE, *log_update(actor, "grpo", overrides=SELECTED_IN_MINI_BATCH)}
    keys |= {*log_update(actor, "grpo", at_ratio_one=True)}
    for overrides in (["+clipx/hold=clip_fraction", "clipx.hold.value=0.02"], ["+clipx/mask=icepop"]):
        keys |= {*log_update(actor, "grpo", overrides=overrides)}
    # A method without metrics of its own, those with some, and verl's loss.
    for group in ["grpo", *(name for name in BUILT_IN if METHODS[name]().statistics_size), "observe"]:
        metrics = log_update(actor, group)
        keys |= {*metrics}
        if group != "observe":
            two_updates = {name: [value, value] for name, value in metrics.items()}
            keys |= {*add_metrics_over_updates(two_updates, METHODS[group]())}
    keys |= {*merge_metrics_of_passes({"low": {"clipx/ratio_mean": [1.0]}, "high": {"clipx/ratio_mean": [1.0]}})}
    return {key.removeprefix("actor/") for key in keys}


@pytest.mark.slow
def test_every_key_in_the_documents_tables_is_logged(actor):
    tables = [markdown_table(part).splitlines() for part in LISTS]
    sections = [[line for line in table if line.startswith("| | **")] for table in tables]
    assert all(len(lines) == len(set(lines)) for lines in sections)
    rows = [line for table in tables for line in table if line.startswith("| `")]
    patterns = patterns_in("\n".join(row.split("|")[1] for row in rows))
    assert len(patterns) > 50
    logged_keys = keys_logged_by_runs(actor)
    assert [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, logged_keys))] == []


# verl logs them where samples are weighted or dropped, which no shipped run does.
VERLS_OF_STALE_SAMPLES = {
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "training/off_policy/evicted_samples",
}


@pytest.mark.slow
def test_what_rules_and_pages_read_is_logged_by_runs_or_stands_in_their_configuration(actor):
    # verl's own metrics, and a configuration, are of the runs that the demo ships.
    runs = [read_run(path) for path in sorted(SHIPPED.iterdir()) if (path / "metrics.jsonl").exists()]
    available = {key for run in runs for key in (*run.log, *run.configuration)} | VERLS_OF_STALE_SAMPLES
    available |= {f"actor/{key}" if key.startswith("clipx/") else key for key in keys_logged_by_runs(actor)}
    available |= {f"clipx.{name}" for method in BUILT_IN for name in METHODS[method]().parameters}
    constants_of_keys = str({name: value for name, value in vars(keys).items() if name.isupper()})
    read = {*re.findall(r"'((?:actor/clipx|health)/[^'(]+)'", constants_of_keys)}
    read |= {key for rule in RULES for key in rule.reads}
    assert len(read) > 40
    assert sorted(key for key in read - {keys.HELD_OUT} if not fnmatch.filter(available, key)) == []


@pytest.mark.parametrize(
    ("group", "loss_mode"),
    [
        ("grpo", None),
        ("dgpo", None),
        ("observe", "vanilla"),
        ("observe", "gspo"),
        ("observe", "dppo_kl"),
        ("observe", "gpg"),
    ],
)
def test_all_of_them_are_exact_however_the_mini_batch_is_split(actor, group, loss_mode):
    whole = log_update(actor, group, loss_mode=loss_mode)
    own = {name: value for name, value in whole.items() if name.startswith("clipx/")}
    assert "clipx/effective_sample_size" in own
    for split in SPLITS:
        metrics = log_update(actor, group, split, loss_mode=loss_mode)
        assert metrics.keys() == whole.keys()
        assert {name: metrics[name] for name in own} == pytest.approx(own, rel=1e-6, abs=1e-9)


# A loss of a user's, with metrics whose names look like others of the plugin.
LOSS_WITH_NAMES = f"""
from dataclasses import dataclass
from {example_losses.__name__} import WithinSpread
from verl_clipx import of_decision, of_rollout_batch

@dataclass(frozen=True, kw_only=True)
class Names(WithinSpread, name="tests_names"):
    logs = (
        of_decision("sum/spread", "spread", "nats"),
        of_decision("staleness/spread", "spread", "nats"),
        of_decision("count/all", "tokens", "tokens", adds_up=True),
        of_decision("number", "tokens", "tokens"),
        of_rollout_batch("sum/spread_last", "of the last update", "nats"),
    )

    def metrics(self, statistics, decision):
        spread, tokens = decision[0], statistics[0]
        return {{"sum/spread": spread, "staleness/spread": spread, "count/all": tokens, "number": tokens}}

    def over_updates(self, metrics):
        return {{"sum/spread_last": metrics["sum/spread"][-1]}}
"""


def test_a_class_may_call_its_metrics_as_it_likes(actor, tmp_path, monkeypatch):
    (tmp_path / "users_names.py").write_text(LOSS_WITH_NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["clipx.function=users_names:Names", "+clipx.scope=micro_batch"]
    split = SPLITS[1]
    whole = log_update(actor, "custom", WHOLE, overrides=overrides)
    parts = log_update(actor, "custom", split, overrides=overrides)
    assert whole["clipx/sum/spread"] == whole["clipx/staleness/spread"] > 0
    mask = random_batch(0)["mask"]
    assert whole["clipx/count/all"] == whole["clipx/number"] == parts["clipx/count/all"] == mask.sum()
    # A count is the mini-batch's; what does not add up is the mean of the micro-batches' values.
    means_of_ranks = [sum(float(mask[rows].sum()) for rows in rank) / len(rank) for rank in split]
    assert parts["clipx/number"] == pytest.approx(sum(means_of_ranks) / len(means_of_ranks))
    # What a mean over updates would hide.
    two_updates = {"clipx/sum/spread": [whole["clipx/sum/spread"], 9.0], "clipx/number": [1.0, 2.0]}
    metrics = add_metrics_over_updates(two_updates, METHODS["tests_names"]())
    assert metrics == two_updates | {"clipx/sum/spread_last": [9.0]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ratio_mean", "the metric 'ratio_mean': another metric already has this name. Rename it"),
        ("dominant", "verl does not average names with max or min in them. Rename it"),
        ("low/ratio_mean", "the plugin also logs 'ratio_mean' under this name. Rename it"),
    ],
)
def test_a_name_that_would_falsify_another_metric_is_refused(actor, tmp_path, monkeypatch, name, message):
    module = f"users_{name.replace('/', '_')}"
    (tmp_path / f"{module}.py").write_text(
        LOSS_WITH_NAMES.replace('"number"', f'"{name}"').replace("tests_names", module)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=message):
        actor("+clipx=custom", f"clipx.function={module}:Names")
    result = CliRunner().invoke(app, ["check-loss", f"{module}:Names"])
    assert result.exit_code != 0 and message in " ".join(result.output.split())


def test_constants_are_not_logged(actor):
    grpo = log_update(actor, "grpo")
    acpo = log_update(actor, "acpo")
    assert "actor/pg_clipfrac_lower" in grpo and "actor/pg_clipfrac_lower" not in acpo
    # The same number under another name.
    assert not {"clipx/region_fraction/LN", "clipx/region_fraction/HP"} & grpo.keys()
    # Nothing was masked.
    assert not [key for key in grpo if "masked" in key]
