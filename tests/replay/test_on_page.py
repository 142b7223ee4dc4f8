"""`clipx report --replay`: other settings on the page's tokens, as `clipx replay` has them, and wrong words.

Not covered: the switch in a browser (tests/report/test_report_page.py).
"""

import pandas
import pytest

from tests.runs.commands import answer, clipx, page_of
from tests.runs.example_runs import write_run
from verl_clipx.common.traces import read_shards, shards_in


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "grpo-seed1", "grpo", steps=2)


@pytest.mark.slow
def test_the_page_says_what_replay_says(run, tmp_path):
    sweep, words = ["+clipx=grpo", "clipx.clip_high=1.0,2.0"], ["+clipx=acpo", "clipx.alpha=1,2", "+clipx=grpo"]
    options = ["--replay", " ".join(words), "--match", f"clip_fraction=0.04 {' '.join(sweep)}"]
    clipx("report", run, "--out", tmp_path / "out", *options)
    page, tokens = page_of(tmp_path / "out").replace("\u202f", " "), pandas.read_csv(tmp_path / "out" / "tokens.csv")
    settings = answer("replay", run, *words, "--tokens", 10_000)["settings"]
    assert [one["setting"] for one in settings] == ["acpo alpha=1", "acpo alpha=2", "grpo"]
    for one in settings:
        gone = tokens[f"{one['setting']}: weight"].eq(0) & tokens.weight.ne(0) & tokens.advantage.ne(0)
        lost = [token for token in one["tokens"] if token["change"] == "lost"]
        assert gone.sum() == len([token for token in lost if token["update"] == tokens["update"].iloc[0]])
        clipped = tokens[f"{one['setting']}: event"].isin(["low", "high"]).sum()
        assert f"{clipped} under {one['setting']}" in page
    # The run's own setting does what the run did.
    assert tokens["grpo: event"].tolist() == tokens.event.tolist() != tokens["acpo alpha=2: event"].tolist()
    assert "no replay says" in page and "all that there were" in page
    # The parameter that --match finds.
    (match,) = answer("replay", run, *sweep, "--match", "clip_fraction=0.04")["matches"]
    assert f"The closest reachable clip_fraction to 0.04 is {match['reached']:.4g}, under {match['setting']}." in page
    assert f"to {match['beyond']:.4g} on the other side. Exact: every token of the step is traced." in page
    assert match["low"] is None and f"under {match['setting']}" in page and f"{match['setting']}: weight" in tokens
    # Of all updates of the step, by the formulas.
    traced = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    clipped, mass = traced.region.isin(["LN", "HP"]), (traced.ratio * traced.advantage).abs()
    assert f"Clipping took {100 * mass[clipped].sum() / mass.sum():.2f} % of the gradient’s mass" in page
    kept = f"{settings[1]['regained']} of the {clipped.sum()} traced"
    assert f"acpo alpha=2 would have given a gradient to {kept}" in page


@pytest.mark.parametrize(
    ("option", "words", "message"),
    [
        ("--match", "", "--match"),
        ("--match", "clip=0.1 +clipx=acpo clipx.alpha=0.0,4", "--match clip=0.1: must be clip_fraction=NUMBER"),
        ("--match", "clip_fraction=0.1", "name what to replay"),
        ("--replay", "+clipx=acpo clipx.alpha=-1", "alpha"),
    ],
)
def test_wrong_words_are_an_error(run, tmp_path, option, words, message):
    assert message in clipx("report", run, "--out", tmp_path / "out", option, words, code=1)
    assert not (tmp_path / "out" / "report.html").exists()
