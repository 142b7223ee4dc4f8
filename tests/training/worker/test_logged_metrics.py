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
from tests.training.worker.updates import WHOLE, aggregated
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

# So that the search moves a bound, tokens are clipped on both sides, and some sequences are not.
FURTHER = {
    "bapo": ("clipx.target=0.9",),
    "acpo": ("clipx.alpha=0.5",),
    "kl_cov": ("clipx.share=0.3",),
    "gspo": ("clipx.clip_low=0.95", "clipx.clip_high=1.05"),
}
SPLITS = [*updates.SPLITS.values(), [[[4, 5]], [[0, 1]], [[2, 3]]]]
SELECTING = ("+clipx/select=high_entropy", "clipx.select.over=mini_batch")
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=True"
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def random_batch(seed):
    """Sequences of unlike lengths whose tokens are in every region."""
    batch, generator = ragged(seed, spread=0.5, sequences=6, length=40), torch.Generator().manual_seed(seed)
    noise, entropy = torch.rand(2, 6, 40, generator=generator, dtype=torch.float64)
    return batch | {
        "mask": batch.pop("response_mask"),
        "sampler_log_prob": batch["old_log_prob"] + 0.1 * noise,
        "entropy": entropy,
    }


def logged(actor, group, split=WHOLE, seed=0, overrides=(), verls="vanilla", at_ratio_one=False):
    """What a worker logs of one optimizer step.

    `verls` is the loss that is observed; `at_ratio_one`: whether the step is taken for one whose sums are the floor.
    """
    needed = [LOG_PROBS]
    if group == "observe":
        needed = [f"actor_rollout_ref.actor.policy_loss.loss_mode={verls}"]
        observe_registered(verls)
    config = actor(f"+clipx={group}", *needed, *FURTHER.get(group, ()), *overrides)
    batch = random_batch(seed)
    step = OptimizerStep(at_ratio_one=at_ratio_one)
    function = with_micro_batch(partial(ppo_loss, config=config), config.policy_loss.clipx, Schedule(), lambda: step)
    found = aggregated(function, batch, split)
    return {name: values[0] for name, values in replace_sums_with_metrics({k: [v] for k, v in found.items()}).items()}


def documented(text):
    """The keys that a text names, as patterns: `…` and `bin_0` stand for what may follow."""
    patterns = [re.escape(code).replace("…", ".+") for code in inline_code_of(text)]
    return [re.compile(re.sub(r"(bin_)\d+", r"\1\\d+", pattern)) for pattern in patterns]


OWN = ("clipx/", "actor/ppo_kl", "actor/pg_clipfrac")


@pytest.mark.slow
@pytest.mark.parametrize("group", [*BUILT_IN, "observe"])
def test_every_key_is_in_the_document_no_two_are_equal_and_they_are_few(actor, group):
    batches = [logged(actor, group, seed=seed) for seed in range(4)]
    found = {name: [one[name] for one in batches] for name in batches[0] if name.startswith(OWN)}
    of_no_bin = sorted(name for name in found if not re.search(r"/bin_\d+$", name))
    assert len(of_no_bin) <= 20, f"{group} logs {len(of_no_bin)} metrics, 20 at most: {', '.join(of_no_bin)}"
    patterns = documented("\n\n".join([DOCUMENT.read_text(encoding="utf-8"), *map(markdown_table, LISTS)]))
    assert not [name for name in found if not any(one.fullmatch(name.removeprefix("actor/")) for one in patterns)]
    assert not [name for name in found if name.startswith("clipx_sum/") or "max" in name or "min" in name]
    # A method with a hard clip, or without a bound, keeps metrics that all have at 0. What verl's own loss logs beside
    # the exact metrics is verl's, and its clip fractions are those of the regions where its clip is PPO's.
    values = {name: value for name, value in found.items() if any(value)}
    if group == "observe":
        values = {name: value for name, value in values.items() if name.startswith("clipx/") and "region" not in name}
    if group == "p3o":
        # It has an upper bound alone, and verl's fraction is of both sides; its cap is the effective sample size.
        del values["actor/pg_clipfrac"], values["clipx/ratio_cap"]
    for one, other in itertools.combinations(values, 2):
        assert values[one] != pytest.approx(values[other], rel=1e-9), f"{one} and {other} are always equal"


# What neither a loss nor a rollout batch logs: the receipt's, the worker's, and those of the trainer's process.
ELSEWHERE = {
    *("clipx/receipt", "clipx/receipt_failed"),
    *("clipx/rejected_fraction", "clipx/skipped_updates"),
    *("clipx/staleness/versions", "clipx/staleness/versions_first"),
    *("clipx/not_finite/log_probs", "clipx/not_finite/rank", "critic/score/standard_error"),
    *(f"health/not_finite/{of}" for of in ("rewards", "advantages", "log_probs")),
    *(f"health/{name}" for name in ("alike_prompts", "undecided", "cut_responses")),
    # Measured before the first update: tests/training/worker/test_floor.py.
    *(f"clipx/floor_recut/{name}" for name in ("log_ratio", "clip_fraction_low", "clip_fraction_high")),
    *(f"clipx/floor_recut/{name}/bin_0" for name in ("tokens", "log_ratio_sum", "squared_sum")),
}


def logged_by_runs(actor):
    """Every key that some run logs of the plugin's, without the beginning that verl gives it."""
    # Selection over the mini-batch, by the threshold of each micro-batch where no pass found one.
    found = {*ELSEWHERE, *logged(actor, "grpo", overrides=SELECTING), *logged(actor, "grpo", at_ratio_one=True)}
    for further in (["+clipx/hold=clip_fraction", "clipx.hold.value=0.02"], ["+clipx/mask=icepop"]):
        found |= {*logged(actor, "grpo", overrides=further)}
    # One without metrics of its own, those with, and verl's.
    for group in ["grpo", *(name for name in BUILT_IN if METHODS[name]().statistics_size), "observe"]:
        names = logged(actor, group)
        two_updates = {name: [value, value] for name, value in names.items()}
        found |= {*names, *(add_metrics_over_updates(two_updates, METHODS[group]()) if group != "observe" else ())}
    found |= {*merge_metrics_of_passes({"low": {"clipx/ratio_mean": [1.0]}, "high": {"clipx/ratio_mean": [1.0]}})}
    return {name.removeprefix("actor/") for name in found}


@pytest.mark.slow
def test_every_key_in_the_documents_tables_is_logged(actor):
    tables = [markdown_table(part).splitlines() for part in LISTS]
    sections = [[line for line in table if line.startswith("| | **")] for table in tables]
    assert all(len(lines) == len(set(lines)) for lines in sections)
    rows = [line for table in tables for line in table if line.startswith("| `")]
    patterns = documented("\n".join(row.split("|")[1] for row in rows))
    assert len(patterns) > 50
    found = logged_by_runs(actor)
    assert [pattern.pattern for pattern in patterns if not any(map(pattern.fullmatch, found))] == []


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
    found = {name for run in runs for name in run.log} | VERLS_OF_STALE_SAMPLES
    found |= {f"actor/{name}" if name.startswith("clipx/") else name for name in logged_by_runs(actor)}
    found |= {key for run in runs for key in run.configuration}
    found |= {f"clipx.{name}" for method in BUILT_IN for name in METHODS[method]().parameters}
    named = str({name: value for name, value in vars(keys).items() if name.isupper()})
    read = {*re.findall(r"'((?:actor/clipx|health)/[^'(]+)'", named), *(key for rule in RULES for key in rule.reads)}
    assert len(read) > 40
    assert sorted(key for key in read - {keys.HELD_OUT} if not fnmatch.filter(found, key)) == []


@pytest.mark.parametrize(
    ("group", "verls"),
    [("grpo", None), ("dgpo", None), *(("observe", loss) for loss in ("vanilla", "gspo", "dppo_kl", "gpg"))],
)
def test_all_of_them_are_exact_however_the_mini_batch_is_split(actor, group, verls):
    whole, *parts = (logged(actor, group, cut, verls=verls) for cut in (WHOLE, *SPLITS))
    own = {name: value for name, value in whole.items() if name.startswith("clipx/")}
    assert "clipx/effective_sample_size" in own
    for one in parts:
        assert one.keys() == whole.keys()
        assert {name: one[name] for name in own} == pytest.approx(own, rel=1e-6, abs=1e-9)


NAMES = f"""
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
    (tmp_path / "users_names.py").write_text(NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    overrides, split = ["clipx.function=users_names:Names", "+clipx.scope=micro_batch"], SPLITS[1]
    whole, parts = (logged(actor, "custom", cut, overrides=overrides) for cut in (WHOLE, split))
    assert whole["clipx/sum/spread"] == whole["clipx/staleness/spread"] > 0
    mask = random_batch(0)["mask"]
    assert whole["clipx/count/all"] == whole["clipx/number"] == parts["clipx/count/all"] == mask.sum()
    # A count is the mini-batch's; what does not add up is the mean of what the micro-batches found.
    of_ranks = [sum(float(mask[rows].sum()) for rows in rank) / len(rank) for rank in split]
    assert parts["clipx/number"] == pytest.approx(sum(of_ranks) / len(of_ranks))
    # What a mean over updates would hide.
    two_updates = {"clipx/sum/spread": [whole["clipx/sum/spread"], 9.0], "clipx/number": [1.0, 2.0]}
    found = add_metrics_over_updates(two_updates, METHODS["tests_names"]())
    assert found == two_updates | {"clipx/sum/spread_last": [9.0]}


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
    (tmp_path / f"{module}.py").write_text(NAMES.replace('"number"', f'"{name}"').replace("tests_names", module))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=message):
        actor("+clipx=custom", f"clipx.function={module}:Names")
    result = CliRunner().invoke(app, ["check-loss", f"{module}:Names"])
    assert result.exit_code != 0 and message in " ".join(result.output.split())


def test_constants_are_not_logged(actor):
    grpo, acpo = (logged(actor, group) for group in ("grpo", "acpo"))
    assert "actor/pg_clipfrac_lower" in grpo and "actor/pg_clipfrac_lower" not in acpo
    # The same number under another name.
    assert not {"clipx/region_fraction/LN", "clipx/region_fraction/HP"} & grpo.keys()
    # Nothing was masked.
    assert not [key for key in grpo if "masked" in key]
