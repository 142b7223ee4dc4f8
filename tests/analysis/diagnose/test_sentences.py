"""Every sentence that `clipx diagnose` prints of the committed logs, healthy and faulty ones, is true of the log: read
here by json, and compared by loops over its numbers, without pandas and without the plugin's rules. A sentence of
another form fails. Not covered: whether a finding is a fault (tests/analysis/diagnose/test_rules.py), what the advice
is worth.
"""

import csv
import gzip
import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.analysis.runs.example_runs import write_log
from verl_clipx.analysis.demo.files import SHIPPED
from verl_clipx.cli import app

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ACTOR = "actor_rollout_ref.actor"
SCORE, LENGTH, ENTROPY = "critic/score/mean", "response_length/mean", "actor/entropy"
RATIO, KL, SHARE_AFTER = "actor/clipx/ratio_mean", "actor/ppo_kl", "positive_share_after"
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
    done = CliRunner(env={"COLUMNS": "10000"}).invoke(app, ["diagnose", "--verbose", str(path)], catch_exceptions=False)
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


def near(said: str, value: float) -> bool:
    """Whether a number is what was said of it, in as many digits as it has, which are three at least."""
    digits = max(3, len(re.sub(r"e.*|\D", "", said).lstrip("0")))
    return math.isclose(float(said), value, rel_tol=0.6 * 10.0 ** (1 - digits), abs_tol=1e-12)


# By rule, from a log and an onset: how the evidence must read, # being a number; these numbers; the onset itself, where
# it is no part of the numbers. What else holds is asserted.


# By rule, from a log, an onset and the evidence: how it must read, # being a number; these numbers; the onset itself.
# None where it has been read to its end. What else holds is asserted.


def halved(log: Log, key: str, best: float, step: int) -> str:
    """By which step a value had fallen to half of its best, where that was before the onset."""
    values = log.of[key]
    peak = max(at for at in values if at <= step and values[at] >= best)
    half = log.first(lambda at: at >= peak and values[at] < best / 2, key)
    return f", halved by step {half}" if half is not None and half < step else ""


def entropy_collapse(log: Log, step: int, _: str):
    values = log.of[ENTROPY]
    most = max([*values.values()][:3])
    begin = log.first(lambda at: values[at] < most / 20, ENTROPY)
    return f"{ENTROPY} #, at most # in its first steps{halved(log, ENTROPY, most, step)}", [values[step], most], begin


def entropy_explosion(log: Log, step: int, _: str):
    values = log.of[ENTROPY]
    begin = values[min(values)]
    high = min(max(5 * begin, 1.0), max(2 * begin, 5.0))
    return f"{ENTROPY} #, # in its first step", [values[step], begin], log.first(lambda at: values[at] > high, ENTROPY)


def reward_collapse(log: Log, step: int, _: str):
    values = log.of[SCORE]
    best = max(value for at, value in values.items() if at < step)
    after = statistics.mean([value for at, value in values.items() if at >= step][:3])
    assert after < best / 4
    text = f"{SCORE} # on average over 3 steps, at most # before{halved(log, SCORE, best, step)}"
    return text, [after, best], step


def reward_decline(log: Log, step: int, evidence: str):
    after, count, best = re.match(
        rf"{SCORE} {NUMBER} on average over (\d+) steps, at most {NUMBER} before", evidence
    ).groups()
    values = log.of[SCORE]
    since = [value for at, value in values.items() if at >= step][: int(count)]
    assert near(after, statistics.mean(since))
    assert near(best, max(value for at, value in values.items() if at < step))
    end = re.search(rf"(?<!mean@1 ){NUMBER} at the end", evidence)
    assert near(end[1], statistics.mean([*values.values()][-3:])) and float(end[1]) < 0.75 * float(best)


def single_updates(log: Log, step: int, _: str):
    ratio, kl = log.of[RATIO], log.of[KL]
    assert all(abs(value - 1) < 1e-6 for value in ratio.values()) and all(abs(value) < 1e-6 for value in kl.values())
    return f"{RATIO} 1 and {KL} 0 in all # steps", [len(ratio)], min(ratio)


def idle_search(log: Log, step: int, _: str):
    values, target = log.of["actor/clipx/positive_share_before"], log.configuration["clipx.target"]
    assert target <= min(values.values())
    for side in ("low", "high"):
        assert len({round(value, 6) for value in log.of[f"actor/clipx/c_{side}"].values()}) == 1
    text = "actor/clipx/positive_share_before # or more, target #"
    return text, [min(values.values()), target], min(values)


def few_tokens(log: Log, step: int, _: str):
    counts = [values for key, values in log.of.items() if key.startswith("actor/clipx/count/bin_")]
    most = log.configuration["clipx.alpha"] ** 2 + 1
    having = [sum(0 < values[at] <= most for values in counts) for at in range(step, step + 3)]
    assert min(having) > len(counts) / 2
    return "actor/clipx/count/bin_* at most # in # of # bins", [most, having[0], len(counts)], step


def saturated(log: Log, step: int, _: str):
    of, bounds, shares = log.configuration, *(log.of[f"actor/clipx/{key}"] for key in ("c_high_last", SHARE_AFTER))
    for at in range(step, step + 3):
        assert shares[at] < of["clipx.target"] and bounds[at] > of["clipx.upper_stop"] - of["clipx.upper_step"]
    text = f"actor/clipx/c_high_last #, actor/clipx/{SHARE_AFTER} #, target #"
    return text, [bounds[step], shares[step], of["clipx.target"]], step


def anchored(log: Log, step: int, _: str):
    ratios, kls = log.of[RATIO], log.of[KL]
    assert all(abs(ratios[at] - 1) >= 1e-2 or abs(kls[at]) >= 1e-3 for at in range(step, step + 3))
    assert log.configuration["data.train_batch_size"] == log.configuration[f"{ACTOR}.ppo_mini_batch_size"]
    return f"{RATIO} #, {KL} # at one update a rollout batch", [ratios[step], kls[step]], step


def explosion(log: Log, step: int, _: str):
    values = log.of["actor/grad_norm"]
    before = statistics.median([one for at, one in values.items() if at < step])
    assert values[step] > 100 * before
    return "actor/grad_norm #, median before #", [values[step], before], step


def truncated(log: Log, step: int, evidence: str):
    assert step == log.steps[0]
    for part in evidence.split(" and "):
        key, value = part.split()
        assert log.configuration[key] == float(value) and (float(value) < 1) == key.endswith("top_p")


def skipped(log: Log, step: int, evidence: str):
    count = re.match(r"(\d+)(?: of (\d+))? updates? skipped(?: or taken, depending on the engine,)? since", evidence)
    counts = log.of["actor/clipx/skipped_updates"]
    assert sum(value for at, value in counts.items() if at >= step) == int(count[1])
    assert step == min(at for at, value in counts.items() if value > 0)
    assert count[2] is None or int(count[2]) % sum(at >= step for at in log.steps) == 0


def not_finite(log: Log, step: int, evidence: str):
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


def sides(log: Log, step: int, evidence: str):
    keys = [part.split()[0] for part in evidence.split(", ")]
    for at in range(step, step + 5):
        shares = [log.of[key][at] for key in keys]
        assert sum(shares) >= 0.01 and max(shares) >= 0.98 * sum(shares)
    return ", ".join(f"{key} #" for key in keys), [log.of[key][step] for key in keys], step


def no_signal(log: Log, step: int, evidence: str):
    if evidence.startswith("health/"):
        values = log.of["health/alike_prompts"]
        begin = log.first(lambda at: values[at] == 1, "health/alike_prompts")
        return "health/alike_prompts #, at most #", [1, max(values.values())], begin
    lows, highs = (log.of[f"critic/advantages/{end}"] for end in ("min", "max"))
    least, most = (log.of[f"critic/score/{end}"] for end in ("min", "max"))
    none = {at: max(-lows[at], highs[at]) <= (0.1 if least[at] == most[at] else 1e-6) for at in lows}
    text = "critic/advantages/min #, critic/advantages/max #, as good as 0 in # of # steps"
    begin = log.first(lambda at: none[at], "critic/advantages/min")
    return text, [lows[step], highs[step], sum(none.values()), len(lows)], begin


def repeated(log: Log, step: int, _: str):
    scores, lengths = log.of[SCORE], log.of[LENGTH]
    seen, again = set(), []
    for at in scores:
        if (scores[at], lengths[at]) in seen:
            again.append(at)
        seen.add((scores[at], lengths[at]))
    text = f"{SCORE} # and {LENGTH} # as in an earlier step, in # steps"
    return text, [scores[step], lengths[step], len(again)], log.first(lambda at: at in again, SCORE)


def drift(log: Log, step: int, _: str):
    kls, clipped = log.of["rollout_corr/k3_kl"], log.of["actor/pg_clipfrac"]
    most = max([*kls.values()][:3])
    begin = log.first(lambda at: clipped[at] == 0 and kls[at] >= max(0.01, 4 * most), "rollout_corr/k3_kl")
    return "actor/pg_clipfrac 0, rollout_corr/k3_kl #, at most # in its first steps", [kls[step], most], begin


def jump(log: Log, step: int, evidence: str):
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


def held_out(log: Log, step: int, evidence: str):
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


def check_evidence(log: Log, name: str, step: int, evidence: str) -> None:
    if name in LIMITS:
        key = evidence.split()[0]
        values = log.of[key]
        begin = log.first(lambda at: values[at] >= LIMITS[name], key)
        text, numbers = f"{key} #, at most #", [values[step], max(values.values())]
    elif (found := EVIDENCE[name](log, step, evidence)) is None:
        return
    else:
        text, numbers, begin = found
    said = re.fullmatch(re.escape(text).replace(r"\#", NUMBER), evidence)
    assert said and all(map(near, said.groups(), numbers)) and step == begin, (evidence, text, numbers, begin)


EVIDENCE = {
    "entropy collapse": entropy_collapse,
    "entropy explosion": entropy_explosion,
    "reward collapse": reward_collapse,
    "reward decline": reward_decline,
    "bounds idle: one update a rollout batch": single_updates,
    "bounds idle: the search never started": idle_search,
    "bounds idle: too few tokens a bin": few_tokens,
    "bounds idle while the sampler drifts away": drift,
    "bounds saturated": saturated,
    "sampler jumps away from the trainer": jump,
    "ratio anchored to another policy": anchored,
    "truncated sampling": truncated,
    "gradient explosion": explosion,
    "skipped updates": skipped,
    "values that are not finite": not_finite,
    "one-sided clipping": sides,
    "no learning signal": no_signal,
    "one batch trained again and again": repeated,
    "held-out score falls while the training reward rises": held_out,
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
        rarer = min(sum(value > 0 for value in x), sum(value < 0 for value in x))
        around_zero = key == "actor/pg_loss" or (rarer > 0 and rarer >= len(x) / 10)
        least = 0.0
        if around_zero and len(x) > 1:
            neighbours = statistics.mean(abs(two - one) for one, two in itertools.pairwise(x))
            least = 4 * math.sqrt(math.pi) / 2 * neighbours
        begins = [steps[at] for at in jumps(x, least) or ([] if around_zero else rises(x))]
        if begins:
            found[key, True] = min(begins)
        if around_zero:
            continue
        spike = next((at for at in range(5, len(x)) if 0 < 3 * max(map(abs, x[:at])) <= x[at] >= 1e-5), None)
        if spike is not None and steps[spike] < min(begins, default=math.inf):
            found[key, False] = steps[spike]
    return found


def jumps(x: list[float], least: float) -> list[int]:
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
            if abs(later - level) < max(least, max(abs(level), abs(later)) / 4):
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
            check_evidence(log, name, int(step), evidence)
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
