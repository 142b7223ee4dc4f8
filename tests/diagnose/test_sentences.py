"""Every sentence that `clipx diagnose` prints of the committed logs, healthy and faulty ones, is true of the log: read
here by json, and compared by loops over its numbers, without pandas and without the plugin's rules. A sentence of
another form fails. Not covered: whether a finding is a fault (tests/diagnose/test_rules.py), what the advice is worth.
"""

import csv
import gzip
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import write_log
from verl_clipx.cli import app
from verl_clipx.demo.files import SHIPPED

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ACTOR = "actor_rollout_ref.actor"
SCORE, LENGTH = "critic/score/mean", "response_length/mean"
MISMATCH = "training/rollout_probs_diff_mean"
COLUMNS = {
    "reward": SCORE,
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "clip_fraction_low": "actor/clipx/clip_fraction_low",
    "clip_fraction_high": "actor/clipx/clip_fraction_high",
    "grad_norm": "actor/grad_norm",
    "response_length": LENGTH,
}
# The least value of three steps in a row, by what a rule of one metric says.
LIMITS = {
    "few prompts teach, because samples score alike": 0.9,
    "held target out of reach": 0.5,
    "mismatch of rollout and training": 0.02,
    "responses cut at the limit": 0.25,
    "answers without a verdict": 0.1,
}
NUMBER = r"(-?[\d.]+(?:e[-+]\d+)?)"
KEY = r"([\w-]+(?:/[\w@-]+)+)"


def said_of(path: Path) -> list[str]:
    done = CliRunner(env={"COLUMNS": "10000"}).invoke(app, ["diagnose", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


class Log:
    """A log's finite numbers: metric to value by step, without what was logged before the first."""

    def __init__(self, rows: dict[int, dict[str, float | None]], record: dict):
        self.record, self.configuration = record, record.get("configuration", {})
        self.of: dict[str, dict[int, float]] = {}
        for step in sorted(rows):
            for key, value in rows[step].items():
                if value is not None and math.isfinite(value) and (step > 0 or key.startswith("val-")):
                    self.of.setdefault(key, {})[step] = float(value)
        if "actor/entropy" not in self.of and "actor/entropy_loss" in self.of:
            self.of["actor/entropy"] = self.of["actor/entropy_loss"]
        self.steps = [step for step in sorted(rows) if step > 0]

    def first(self, holds, key: str, lasting: int = 3) -> int | None:
        """The first step of so many in a row at which something holds, of those with a metric."""
        steps = [step for step in self.of.get(key, {}) if step > 0]
        flags = [holds(step) for step in steps]
        return next((step for at, step in enumerate(steps) if flags[at : at + lasting] == [True] * lasting), None)


def kept(path: Path) -> Log:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    record = lines.pop(0) if "step" not in lines[0] else {}
    return Log({line["step"]: line["data"] for line in lines}, record)


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[Path, Log]:
    folder, found = tmp_path_factory.mktemp("logs"), {}
    by_run: dict[str, list[dict]] = {}
    with (RESULTS / "cpu_small_steps.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {COLUMNS[key]: float(value) for key, value in row.items() if key in COLUMNS}
            by_run.setdefault(f"{row['preset']}-seed{row['seed']}", []).append(numbers)
    for name, rows in by_run.items():
        path = write_log(folder / f"{name}.jsonl", rows)
        found[path] = kept(path)
    files = [path for name in ("faults", "validated") for path in (RESULTS / "runs" / name).glob("*.jsonl.gz")]
    # Of the table reversal the healthy ones.
    files += [
        path for path in (RESULTS / "runs/reversal").glob("*.jsonl.gz") if path.name.startswith(("dppo_", "grpo_"))
    ]
    return found | {path: kept(path) for path in [*files, *SHIPPED.glob("*-seed1/metrics.jsonl")]}


def near(said: str, value: float, digits: int = 3) -> bool:
    """Whether a number is what was said of it, in so many digits."""
    return math.isclose(float(said), value, rel_tol=0.6 * 10.0 ** (1 - digits), abs_tol=1e-12)


def check_limit(log: Log, name: str, step: int, evidence: str) -> None:
    key, value, most = re.fullmatch(rf"{KEY} {NUMBER}, at most {NUMBER}", evidence).groups()
    values = log.of[key]
    assert near(value, values[step]) and near(most, max(values.values()))
    assert step == log.first(lambda at: values[at] >= LIMITS[name], key)


def fell_to_half(log: Log, key: str, best: float, step: int, words: str) -> None:
    """That a value had fallen to half of its best by a step, which is said where it was before the onset."""
    values = log.of[key]
    peak = max(at for at in values if at <= step and values[at] >= best)
    half = log.first(lambda at: at >= peak and values[at] < best / 2, key)
    said = re.fullmatch(r"(?:, halved by step (\d+))?", words)[1]
    assert said == (str(half) if half is not None and half < step else None)


def check_entropy_collapse(log: Log, step: int, evidence: str) -> None:
    value, first, rest = re.fullmatch(
        rf"actor/entropy {NUMBER}, at most {NUMBER} in its first steps(.*)", evidence
    ).groups()
    values = log.of["actor/entropy"]
    most = max([*values.values()][:3])
    assert near(value, values[step]) and near(first, most)
    assert step == log.first(lambda at: values[at] < most / 20, "actor/entropy")
    fell_to_half(log, "actor/entropy", most, step, rest)


def check_reward_collapse(log: Log, step: int, evidence: str) -> None:
    after, before, rest = re.fullmatch(
        rf"{SCORE} {NUMBER} on average over 3 steps, at most {NUMBER} before(.*)", evidence
    ).groups()
    values = log.of[SCORE]
    earlier = [value for at, value in values.items() if at < step]
    assert near(before, max(earlier))
    assert near(after, statistics.mean([value for at, value in values.items() if at >= step][:3]))
    assert float(after) < max(earlier) / 4
    fell_to_half(log, SCORE, max(earlier), step, rest)


def check_single_updates(log: Log, step: int, evidence: str) -> None:
    count = re.fullmatch(r"actor/clipx/ratio_mean 1 and actor/ppo_kl 0 in all (\d+) steps", evidence)[1]
    ratio, kl = log.of["actor/clipx/ratio_mean"], log.of["actor/ppo_kl"]
    assert step == min(ratio) and int(count) == len(ratio)
    assert all(abs(value - 1) < 1e-6 for value in ratio.values()) and all(abs(value) < 1e-6 for value in kl.values())


def check_idle_search(log: Log, step: int, evidence: str) -> None:
    share, target = re.fullmatch(
        rf"actor/clipx/positive_share_before {NUMBER} or more, target {NUMBER}", evidence
    ).groups()
    values = log.of["actor/clipx/positive_share_before"]
    assert step == min(values) and near(share, min(values.values()))
    assert float(target) == log.configuration["clipx.target"] <= min(values.values())
    for side in ("low", "high"):
        assert len({round(value, 6) for value in log.of[f"actor/clipx/c_{side}"].values()}) == 1


def check_few_tokens(log: Log, step: int, evidence: str) -> None:
    most, few, bins = re.fullmatch(
        rf"actor/clipx/count/bin_\* at most {NUMBER} in (\d+) of (\d+) bins", evidence
    ).groups()
    counts = [values for key, values in log.of.items() if key.startswith("actor/clipx/count/bin_")]
    assert int(bins) == len(counts) and float(most) == log.configuration["clipx.alpha"] ** 2 + 1
    for at in range(step, step + 3):
        having = sum(0 < values[at] <= float(most) for values in counts)
        assert having > len(counts) / 2 and (at > step or having == int(few))


def check_saturated(log: Log, step: int, evidence: str) -> None:
    high, share, target = re.fullmatch(
        rf"actor/clipx/c_high_last {NUMBER}, actor/clipx/positive_share_after {NUMBER}, target {NUMBER}", evidence
    ).groups()
    of = log.configuration
    bounds, shares = log.of["actor/clipx/c_high_last"], log.of["actor/clipx/positive_share_after"]
    assert near(high, bounds[step]) and near(share, shares[step]) and float(target) == of["clipx.target"]
    for at in range(step, step + 3):
        assert shares[at] < of["clipx.target"] and bounds[at] > of["clipx.upper_stop"] - of["clipx.upper_step"]


def check_anchored(log: Log, step: int, evidence: str) -> None:
    ratio, kl = re.fullmatch(
        rf"actor/clipx/ratio_mean {NUMBER}, actor/ppo_kl {NUMBER} at one update a rollout batch", evidence
    ).groups()
    ratios, kls = log.of["actor/clipx/ratio_mean"], log.of["actor/ppo_kl"]
    assert near(ratio, ratios[step], 4) and near(kl, kls[step])
    assert all(abs(ratios[at] - 1) >= 1e-2 or abs(kls[at]) >= 1e-3 for at in range(step, step + 3))
    assert log.configuration["data.train_batch_size"] == log.configuration[f"{ACTOR}.ppo_mini_batch_size"]


def check_truncated(log: Log, step: int, evidence: str) -> None:
    assert step == log.steps[0]
    for part in evidence.split(" and "):
        key, value = part.split()
        assert log.configuration[key] == float(value) and (float(value) < 1) == key.endswith("top_p")


def check_explosion(log: Log, step: int, evidence: str) -> None:
    value, median = re.fullmatch(rf"actor/grad_norm {NUMBER}, median before {NUMBER}", evidence).groups()
    values = log.of["actor/grad_norm"]
    before = statistics.median([one for at, one in values.items() if at < step])
    assert near(value, values[step]) and near(median, before) and values[step] > 100 * before


def check_entropy_explosion(log: Log, step: int, evidence: str) -> None:
    value, first = re.fullmatch(rf"actor/entropy {NUMBER}, {NUMBER} in its first step", evidence).groups()
    values = log.of["actor/entropy"]
    begin = values[min(values)]
    assert near(value, values[step]) and near(first, begin)
    high = min(max(5 * begin, 1.0), max(2 * begin, 5.0))
    assert step == log.first(lambda at: values[at] > high, "actor/entropy")


def check_skipped(log: Log, step: int, evidence: str) -> None:
    count = re.match(r"(\d+)(?: of (\d+))? updates? skipped(?: or taken, depending on the engine,)? since", evidence)
    counts = log.of["actor/clipx/skipped_updates"]
    assert sum(value for at, value in counts.items() if at >= step) == int(count[1])
    assert step == min(at for at, value in counts.items() if value > 0)
    assert count[2] is None or int(count[2]) % sum(at >= step for at in log.steps) == 0


def check_not_finite(log: Log, step: int, evidence: str) -> None:
    begins = []
    for part in evidence.removeprefix("not finite: ").split("; "):
        what, responses, steps = re.fullmatch(r"([\w -]+) of (\d+) responses in (\d+) steps?", part).groups()
        key = {
            "rewards": "health/not_finite/rewards",
            "advantages": "health/not_finite/advantages",
            "log-probabilities": "health/not_finite/log_probs",
            "log-probabilities in skipped updates": "actor/clipx/not_finite/log_probs",
        }[what]
        having = {at: value for at, value in log.of[key].items() if value > 0}
        assert (int(responses), int(steps)) == (sum(having.values()), len(having))
        begins.append(min(having))
    assert step == min(begins)


def check_sides(log: Log, step: int, evidence: str) -> None:
    parts = [part.split() for part in evidence.split(", ")]
    assert all(near(value, log.of[key][step]) for key, value in parts)
    for at in range(step, step + 5):
        shares = [log.of[key][at] for key, _ in parts]
        assert sum(shares) >= 0.01 and max(shares) >= 0.98 * sum(shares)


def check_no_signal(log: Log, step: int, evidence: str) -> None:
    if alike := re.fullmatch(rf"health/alike_prompts 1, at most {NUMBER}", evidence):
        values = log.of["health/alike_prompts"]
        assert float(alike[1]) == max(values.values())
        assert step == log.first(lambda at: values[at] == 1, "health/alike_prompts")
        return
    low, high, none, count = re.fullmatch(
        rf"critic/advantages/min {NUMBER}, critic/advantages/max {NUMBER}, as good as 0 in (\d+) of (\d+) steps",
        evidence,
    ).groups()
    lows, highs = log.of["critic/advantages/min"], log.of["critic/advantages/max"]
    scores = log.of["critic/score/min"], log.of["critic/score/max"]

    def is_none(at: int) -> bool:
        return max(-lows[at], highs[at]) <= (0.1 if scores[0][at] == scores[1][at] else 1e-6)

    assert (int(none), int(count)) == (sum(map(is_none, lows)), len(lows))
    assert near(low, lows[step]) and near(high, highs[step])
    assert step == log.first(is_none, "critic/advantages/min")


def check_repeated(log: Log, step: int, evidence: str) -> None:
    score, length, count = re.fullmatch(
        rf"{SCORE} {NUMBER} and {LENGTH} {NUMBER} as in an earlier step, in (\d+) steps", evidence
    ).groups()
    scores, lengths = log.of[SCORE], log.of[LENGTH]
    seen, again = set(), []
    for at in scores:
        if (scores[at], lengths[at]) in seen:
            again.append(at)
        seen.add((scores[at], lengths[at]))
    assert near(score, scores[step], 6) and near(length, lengths[step], 6)
    assert int(count) == len(again) and step == log.first(lambda at: at in again, SCORE)


def check_drift(log: Log, step: int, evidence: str) -> None:
    kl, first = re.fullmatch(
        rf"actor/pg_clipfrac 0, rollout_corr/k3_kl {NUMBER}, at most {NUMBER} in its first steps", evidence
    ).groups()
    kls, clipped = log.of["rollout_corr/k3_kl"], log.of["actor/pg_clipfrac"]
    most = max([*kls.values()][:3])
    assert near(kl, kls[step]) and near(first, most)
    assert step == log.first(lambda at: clipped[at] == 0 and kls[at] >= max(0.01, 4 * most), "rollout_corr/k3_kl")


def check_jump(log: Log, step: int, evidence: str) -> None:
    value, most, says = re.fullmatch(rf"{KEY} {NUMBER}, at most {NUMBER} before; (.+)", evidence).groups()[1:]
    values, ages = log.of[MISMATCH], log.of.get("training/off_policy/trajectory_staleness/mean", {})
    values = {at: of for at, of in values.items() if at > 0 and not ages.get(at)}
    steps = [*values]
    places = range(3, len(steps) - 2)
    mosts = {at: max(values[one] for one in steps[:at]) for at in places}
    begin = next(at for at in places if min(values[one] for one in steps[at : at + 3]) >= max(1e-3, 4 * mosts[at]))
    assert steps[begin] == step and near(value, values[step]) and near(most, mosts[begin])
    last = statistics.median([values[one] for one in steps[-3:]])
    early, behind = len(steps) - begin < 6, last >= 2 * values[step]
    assert says.startswith("too early") == early and ("weights that stay behind" in says) == (behind and not early)
    assert early or not behind or near(says.partition(" in the last")[0], last)
    assert ("another precision" in says) == (early or not behind) and "leaves tokens out" not in says


def check_held_out(log: Log, step: int, evidence: str) -> None:
    key, low, best_at, best, around, begin, end, since = re.fullmatch(
        rf"{KEY} {NUMBER}, in step (\d+) {NUMBER}; {SCORE} on average {NUMBER} in steps (\d+) to (\d+), {NUMBER} since",
        evidence,
    ).groups()
    values, scores = log.of[key], log.of[SCORE]
    assert near(low, values[step]) and near(best, values[int(best_at)])
    assert values[int(best_at)] == max(value for at, value in values.items() if at < step)
    assert values[step] < 0.9 * values[int(best_at)]
    steps = range(int(begin), int(end) + 1)
    assert max(int(best_at), 1) in steps and int(end) < step
    assert near(around, statistics.mean(scores[at] for at in steps))
    assert near(since, statistics.mean(value for at, value in scores.items() if at >= step))
    assert float(since) > float(around)


EVIDENCE = {
    "entropy collapse": check_entropy_collapse,
    "entropy explosion": check_entropy_explosion,
    "reward collapse": check_reward_collapse,
    "bounds idle: one update a rollout batch": check_single_updates,
    "bounds idle: the search never started": check_idle_search,
    "bounds idle: too few tokens a bin": check_few_tokens,
    "bounds idle while the sampler drifts away": check_drift,
    "bounds saturated": check_saturated,
    "sampler jumps away from the trainer": check_jump,
    "ratio anchored to another policy": check_anchored,
    "truncated sampling": check_truncated,
    "gradient explosion": check_explosion,
    "skipped updates": check_skipped,
    "values that are not finite": check_not_finite,
    "one-sided clipping": check_sides,
    "no learning signal": check_no_signal,
    "one batch trained again and again": check_repeated,
    "held-out score falls while the training reward rises": check_held_out,
}
HEAD = re.compile(r"(\S+): (.+?) from step (\d+) on\. (.+?)\. (The threshold is heuristic\. )?(.+) See docs/\S+\.")


def check_advice(log: Log, advice: str) -> None:
    """What an advice says of the log and of the configuration, and that it is one step, not a menu."""
    assert " or " not in advice and ";" not in advice
    for key, value in re.findall(rf"([a-z_.]+) \(here {NUMBER}\)", advice):
        given = [log.configuration.get(name) for name in (key, f"actor_rollout_ref.{key}")]
        assert float(value) in given
    last = log.steps[-1]
    if said := re.search(rf"mean score is {NUMBER} in the last step, of {NUMBER} to {NUMBER} in all steps", advice):
        low, high = log.of["critic/score/min"].values(), log.of["critic/score/max"].values()
        assert near(said[1], log.of[SCORE][last]) and (float(said[2]), float(said[3])) == (min(low), max(high))
    if said := re.search(rf"All samples of the last step score {NUMBER}, (the most in this log)?", advice):
        assert float(said[1]) == log.of["critic/score/min"][last] == log.of["critic/score/max"][last]
        assert not said[2] or float(said[1]) == max(log.of["critic/score/max"].values())
    assert ("output names." in advice) <= any("not_finite" in key or "skipped" in key for key in log.of)


def changes_in(log: Log) -> dict[tuple[str, bool], int]:
    """Of each metric the first step from which it jumped and stayed or else rose fourfold, and of a spike before."""
    found: dict[tuple[str, bool], int] = {}
    for key, values in log.of.items():
        if key.startswith(("timing", "perf/", "training/global_step", "training/epoch", "_")):
            continue
        steps = [step for step in values if step > 0]
        x = [values[step] for step in steps]
        begins = [steps[at] for at in jumps(x) or rises(x)]
        if begins:
            found[key, True] = min(begins)
        spike = next((at for at in range(5, len(x)) if 0 < 3 * max(map(abs, x[:at])) <= x[at] >= 1e-5), None)
        if spike is not None and steps[spike] < min(begins, default=math.inf):
            found[key, False] = steps[spike]
    return found


def jumps(x: list[float]) -> list[int]:
    """At once by two widths of the 5 to 10 values before, or by four where up to three values are on the way."""
    found = []
    for way, widths in ((0, 2), (3, 4)):
        for at in range(5 + way, len(x) - 2):
            before, after = x[max(0, at - way - 10) : at - way], x[at : at + 3]
            low, high = min(before), max(before)
            beyond = max(min(after) - high, low - max(after))
            if beyond <= 0 or beyond < widths * (high - low):
                continue
            level, later = statistics.median(before), statistics.median(after)
            if abs(later - level) < max(abs(level), abs(later)) / 4:
                continue
            left = at - way
            while left < at and any(2 * low - high <= value <= 2 * high - low for value in x[left:at]):
                left += 1
            found.append(left)
            break
    return found


def rises(x: list[float]) -> list[int]:
    """Three in a row at four times the highest of five values, within the fifteen after these."""
    bases = [max(map(abs, x[left - 5 : left])) for left in range(5, len(x))]
    for at in range(5, len(x) - 2):
        lowest = min((base for base in bases[max(0, at - 17) : at - 4] if base > 0), default=math.inf)
        if min(x[at : at + 3]) >= max(4 * lowest, 1e-5):
            return [max(place for place in range(at) if x[place] <= lowest) + 1]
    return []


def check_changes(log: Log, lines: list[str], printed: bool) -> None:
    expected: dict[int, set[tuple[str, bool]]] = {}
    for (key, stays), step in changes_in(log).items():
        expected.setdefault(step, set()).add((key, stays))
    assert bool(expected) == printed and len(lines) == min(6, len(expected))
    for line, step in zip(lines, sorted(expected), strict=False):
        at, texts = re.fullmatch(r"  step (\d+): (.+)", line).groups()
        *parts, more = [*texts.split("; "), ""] if "more" not in texts else texts.split("; ")
        left_out = int(re.fullmatch(r"and (\d+) more", more)[1]) if more else 0
        assert int(at) == step and len(parts) + left_out == len(expected[step])
        for part in parts:
            key, before, after, spike = re.fullmatch(rf"(\S+) {NUMBER} → {NUMBER}( \(a spike\))?", part).groups()
            assert (key, not spike) in expected[step]
            values = log.of[key]
            earlier = [value for one, value in values.items() if 0 < one < step]
            if spike:
                assert near(before, max(map(abs, earlier))) and near(after, values[step])
            else:
                assert min(earlier) - abs(min(earlier)) / 100 <= float(before) <= 1.01 * max(map(abs, earlier))
                later = [value for one, value in values.items() if one >= step]
                assert min(later) - abs(min(later)) / 100 <= float(after) <= max(later) + abs(max(later)) / 100


SOUGHT = "jumped and stayed, rose fourfold within 15 logged steps, or spiked to 3 times all before"


def check(log: Log, lines: list[str]) -> list[str]:
    """Checks each line; returns the names of the rules that were met."""
    met, changed, printed, rest = [], [], False, []
    for place, line in enumerate(lines):
        if head := HEAD.fullmatch(line):
            _, name, step, evidence, _, advice = head.groups()
            said = (log, name) if name in LIMITS else (log,)
            EVIDENCE.get(name, check_limit)(*said, int(step), evidence)
            check_advice(log, advice)
            met.append(name)
        elif line.startswith("  step "):
            changed.append(line)
        elif line.endswith(f": what {SOUGHT} (it may be no fault):"):
            printed = True
        elif line.endswith(f": no logged value {SOUGHT}."):
            assert not changes_in(log)
        elif shown := re.fullmatch(r"\S+: what changed first shows in 8 steps or more; here are (\d+)\.", line):
            assert int(shown[1]) == len(log.steps) < 8
            printed = None
        else:
            rest = lines[place:]
            break
    if printed is not None:
        check_changes(log, changed, printed)
    counted = re.fullmatch(r"\S+: checked (\d+) of (\d+) rules; (\w+) fired\.(?: Not checked, for want of)?", rest[0])
    unchecked = [name for line in rest[1:] for name in line.partition(": ")[2].split("; ")]
    assert int(counted[1]) + len(unchecked) == int(counted[2]) and counted[3] == (str(len(met)) if met else "none")
    for line in rest[1:]:
        for lack in line.strip().partition(": ")[0].split(", "):
            if lack.startswith("this plugin's metrics"):
                assert not any(key in log.of for key in ("health/undecided", "actor/clipx/hold/missed"))
            elif lack == "the run's configuration":
                assert not log.configuration
            else:
                assert not any(re.fullmatch(lack.replace("*", ".*"), key) for key in log.of)
                assert lack not in log.configuration
    return met


@pytest.mark.slow
def test_every_sentence_of_every_committed_log_is_true_of_it(logs):
    met = {name for path, log in logs.items() for name in check(log, said_of(path))}
    # So that a form which no log has does not look checked.
    assert met >= {*EVIDENCE} - {"entropy explosion"}
