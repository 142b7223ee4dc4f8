"""Each number that README and reversal.md say of the table reversal, anew from the logs in docs/results/runs; three
pages' own tables. Not covered: the cells of reversal.json (tests/papers/tables) and runs whose logs were not kept.
"""

from functools import cache
from itertools import combinations

import numpy as np
import pandas

from verl_clipx.analysis.demo import files as demo
from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.common.statistics.collapse import last_level
from verl_clipx.common.statistics.comparison import Comparison, compare_means, holm
from verl_clipx.common.statistics.estimate import estimate

from .documents import ROOT

RUNS = ROOT / "docs" / "results" / "runs" / "reversal"
REWARD = "critic/score/mean"
ENTROPY = "actor/entropy_loss"
KL = "actor/ppo_kl"
OTHERS = ("dapo", "acpo", "bapo", "dgpo", "cispo", "m2po", "ar")
REGIMES = ("1", "4", "16", "64", "stale")
CONTROLS = (("dppo_narrow_stale", "dppo_stale"), ("grpo_narrow_16", "grpo_16"))


def text_of(page: str) -> str:
    """A page with single blanks, so that line ends don't matter."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@cache
def series(row: str, metric: str) -> np.ndarray:
    """(seeds, batches), in the order of the seeds."""
    paths = sorted(RUNS.glob(f"{row}-seed*.jsonl.gz"))
    return np.array([[step[metric] for step in RunFolder(path).metrics.values()] for path in paths])


def at_end(row: str, metric: str = REWARD) -> np.ndarray:
    return np.array([last_level(seed) for seed in series(row, metric)])


def minus(row: str, baseline: str, metric: str = REWARD) -> Comparison:
    return compare_means(at_end(baseline, metric), at_end(row, metric))


def corrected(row: str, metric: str = REWARD, extra: str | None = None) -> float:
    """Holm's p of a row among those that the table compares with GRPO in its regime, and an extra one."""
    regime = row.rpartition("_")[2]
    rows = [f"{method}_{regime}" for method in OTHERS] + (["grpo_narrow_16"] if regime == "16" else [])
    rows += [extra] if extra else []
    p_values = holm([minus(compared, f"grpo_{regime}", metric).p_value for compared in rows])
    return dict(zip(rows, p_values, strict=True))[row]


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def interval(comparison: Comparison) -> str:
    return f"{signed(comparison.difference)} [{signed(comparison.low)}, {signed(comparison.high)}]"


def with_p(row: str) -> str:
    """A row's difference from GRPO in its regime, and Holm's p."""
    return f"{interval(minus(row, 'grpo_' + row.rpartition('_')[2]))} (p {corrected(row):.3f})"


def share_clipped(row: str) -> str:
    """Lowest and highest percentage of a row's seeds in the last batch."""
    clipped = sum(series(row, f"actor/clipx/clip_fraction_{side}")[:, -1] for side in ("low", "high")) * 100
    digits = 1 if clipped.max() < 2.5 else 0
    return f"{clipped.min():.{digits}f} to {clipped.max():.{digits}f} %"


def all_rewards_corrected() -> dict[str, float]:
    pairs = [(f"{method}_{regime}", f"grpo_{regime}") for regime in REGIMES for method in OTHERS] + [*CONTROLS]
    return dict(zip((row for row, _ in pairs), holm([minus(*pair).p_value for pair in pairs]), strict=True))


def over_all_batches() -> list[tuple[float, float]]:
    """With 16 updates: ACPO's, BAPO's, DGPO's and M2PO's differences from GRPO in the mean of all batches, Holm's p."""
    rows = [*(f"{method}_16" for method in OTHERS), "grpo_narrow_16"]
    baseline, *means = (series(row, REWARD).mean(axis=1) for row in ("grpo_16", *rows))
    compared = [compare_means(baseline, mean) for mean in means]
    pairs = zip(
        (comparison.difference for comparison in compared),
        holm([comparison.p_value for comparison in compared]),
        strict=True,
    )
    return [
        pair for row, pair in zip(rows, pairs, strict=True) if row.split("_")[0] in ("acpo", "bapo", "dgpo", "m2po")
    ]


def correlation(row: str, other: str) -> float:
    seeds = slice(0, min(len(at_end(row)), len(at_end(other))))
    return float(np.corrcoef(at_end(row)[seeds], at_end(other)[seeds])[0, 1])


def with_grpo(regime: str) -> str:
    return signed(float(np.mean([correlation(f"{method}_{regime}", f"grpo_{regime}") for method in OTHERS])), 2)


def sentences_of_log() -> list[str]:
    """What neither the page nor reversal.json says of these runs."""
    clipped = [
        f"{method.upper()} {share_clipped(f'{method}_stale')}" for method in ("dapo", "bapo", "cispo", "dgpo", "m2po")
    ]
    first_seeds = [f"{at_end(f'{method}_64')[0]:.3f}" for method in ("grpo", "m2po", "acpo")]
    return [
        f"clip {', '.join(clipped)} of",
        f"with GRPO {', '.join(map(with_grpo, ('4', '16', '64')))} and {with_grpo('stale')} on old rollouts",
        "with seed 1 GRPO ends at {}, M2PO at {} and ACPO at {}".format(*first_seeds),
    ]


def sentences_of_reversal() -> list[str]:
    wide = "grpo_wide_stale"
    overall = all_rewards_corrected()
    differences, adjusted = zip(*over_all_batches(), strict=True)
    correlations = [
        correlation(f"{first}_{regime}", f"{second}_{regime}")
        for regime in ("4", "16", "64", "stale")
        for first, second in combinations(("grpo", *OTHERS), 2)
    ]
    entropy_differences = [
        minus(f"{method}_16", "grpo_16", ENTROPY).difference for method in ("acpo", "bapo", "dgpo", "m2po")
    ]
    largest = max(corrected(f"{method}_16", ENTROPY) for method in ("acpo", "bapo", "dgpo", "m2po"))
    kl_ratios = [
        series(f"{method}_64", KL).mean() / series("grpo_64", KL).mean() for method in ("acpo", "dgpo", "cispo")
    ]
    last_entropies = [at_end(f"{method}_64", ENTROPY).mean() for method in ("acpo", "dgpo", "cispo")]
    behind = (series("dppo_stale", REWARD) - series("dppo_narrow_stale", REWARD))[:3, 5:7] * 100
    return [
        f"the default bounds is {interval(minus('grpo_narrow_16', 'grpo_16'))}",
        f"DPPO 0.1 minus DPPO 0.2 is {interval(minus('dppo_narrow_stale', 'dppo_stale'))} "
        f"(p {minus('dppo_narrow_stale', 'dppo_stale').p_value:.3f})",
        f"DPPO 0.1 is behind by {behind.min():.0f} to {behind.max():.0f} points",
        f"lower by {-max(entropy_differences):.2f} to {-min(entropy_differences):.2f} nats (p {largest:.3f} or less)",
        f"{min(differences):.2f} to {max(differences):.2f} above GRPO (p {max(adjusted):.3f} or less)",
        *(
            f"{name} {with_p(row)}"
            for name, row in (
                ("ACPO minus GRPO is", "acpo_stale"),
                ("DGPO", "dgpo_stale"),
                ("M2PO", "m2po_stale"),
                ("ACPO minus GRPO is", "acpo_64"),
                ("DGPO", "dgpo_64"),
            )
        ),
        f"GRPO's default bounds clip {share_clipped('grpo_stale')}",
        f"ACPO {share_clipped('acpo_stale')}",
        f"the wide row {share_clipped(wide)}",
        f"ACPO minus GRPO with wide bounds is {interval(minus('acpo_stale', wide))}",
        f"GRPO with wide bounds minus GRPO is {interval(minus(wide, 'grpo_stale'))}, "
        f"p {minus(wide, 'grpo_stale').p_value:.3f} uncorrected and {corrected(wide, extra=wide):.3f}",
        f"over all {len(overall)} comparisons of rewards on this page",
        *(
            f"{name} {overall[row]:.3f}"
            for name, row in (
                ("ACPO's p on old rollouts is", "acpo_stale"),
                ("DGPO's", "dgpo_stale"),
                ("M2PO's", "m2po_stale"),
                ("ACPO's with 64 updates", "acpo_64"),
                ("DGPO's with 64 updates", "dgpo_64"),
            )
        ),
        f"{min(kl_ratios):.0f} to {max(kl_ratios):.0f} times GRPO's",
        f"falls to {min(last_entropies):.1f} to {max(last_entropies):.1f} nats",
        f"the correlation over DPPO's six seeds is {correlation('dppo_narrow_stale', 'dppo_stale'):.2f}",
        f"{signed(float(np.mean(correlations)), 2)} over all pairs of rows",
    ]


def test_each_number_of_reversal_is_that_of_the_logs():
    page = text_of("docs/results/reversal.md")
    assert [sentence for sentence in sentences_of_reversal() if sentence not in page] == []
    assert [sentence for sentence in sentences_of_log() if sentence not in text_of("docs/results/log.md")] == []


def test_the_table_of_rewards_is_that_of_the_logs():
    """A row for each method; bold where Holm's p is below 0.05, which no other reward's is."""
    differing = set()
    for method in ("grpo", *OTHERS):
        means = {f"{method}_{regime}": f"{at_end(f'{method}_{regime}').mean():.3f}" for regime in REGIMES}
        if method != "grpo":
            differing |= {row for row in means if corrected(row) < 0.05}
        # The one with a single update is not in the table.
        cells = [f"**{mean}**" if row in differing else mean for row, mean in means.items() if not row.endswith("_1")]
        name = "GRPO + AR" if method == "ar" else method.upper()
        assert f"| {name} | {' | '.join(cells)} |" in text_of("docs/results/reversal.md")
    assert differing == {"acpo_stale", "dgpo_stale", "m2po_stale", "acpo_64", "dgpo_64"}


def test_the_numbers_of_cpu_small_and_of_the_quick_start_are_those_of_the_runs():
    stored = pandas.read_csv(ROOT / "docs/results/cpu_small_steps.csv").query("preset == 'countdown_grpo_off'")
    first, last = ([f"{reward:.3f}" for reward in stored[stored.step == step].reward] for step in (1, 20))
    sentence = "{}, {} and {} in the first step, {}, {} and {} in the last".format(*first, *last)
    assert sentence in text_of("docs/results/small_runs.md")
    # And the quick start's intervals are Student's.
    held_out_rewards = [
        estimate(pandas.read_json(demo.SHIPPED / run / f"validation/{step}.jsonl", lines=True).score.to_numpy())
        for run, step in ((demo.RUNS[0], 0), *((run, 8) for run in demo.RUNS))
    ]
    page = text_of("docs/dev/launching.md")
    assert all(f"{reward.mean:.3f} [{reward.low:.3f}, {reward.high:.3f}]" in page for reward in held_out_rewards)
