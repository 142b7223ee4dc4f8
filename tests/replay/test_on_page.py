"""`clipx report --replay`: other settings on the page's tokens, by the functions of `clipx replay`.

Covers: the table's and the tokens' agreement with `clipx replay`, the run's own setting, the parameter that `--match`
finds, what the clip took of the gradient, wrong words, runs without traces. Not covered: the switch in a browser
(tests/report/test_report_page.py).
"""

import json

import pandas
import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import write_run
from verl_clipx.cli import app
from verl_clipx.common.traces import read_shards, shards_in


def clipx(*words):
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "grpo-seed1", "grpo", steps=2)


@pytest.mark.slow
def test_the_page_says_what_replay_says(run, tmp_path):
    words = ["+clipx=acpo", "clipx.alpha=1,2", "+clipx=grpo"]
    result = clipx("report", run, "--out", tmp_path / "out", "--replay", " ".join(words))
    assert result.exit_code == 0, result.output
    replayed = clipx("replay", run, *words, "--json", "--tokens", 10_000)
    assert replayed.exit_code == 0, replayed.output
    tokens = pandas.read_csv(tmp_path / "out" / "tokens.csv")
    page = (tmp_path / "out" / "report.html").read_text().replace("<wbr>", "")
    update = tokens["update"].iloc[0]
    settings = json.loads(replayed.stdout)["settings"]
    assert [one["setting"] for one in settings] == ["acpo alpha=1", "acpo alpha=2", "grpo"]
    for one in settings:
        gone = tokens[f"{one['setting']}: weight"].eq(0) & tokens.weight.ne(0) & tokens.advantage.ne(0)
        lost = [token for token in one["tokens"] if token["change"] == "lost" and token["update"] == update]
        assert gone.sum() == len(lost)
        clipped = tokens[f"{one['setting']}: event"].isin(["low", "high"]).sum()
        assert f"{clipped} under {one['setting']}" in page
    # The run's own setting does what the run did.
    assert tokens["grpo: event"].tolist() == tokens.event.tolist()
    assert tokens["acpo alpha=2: event"].tolist() != tokens.event.tolist()
    assert "no replay says" in page and "all that there were" in page


@pytest.mark.slow
def test_the_parameter_that_match_finds_is_on_the_page(run, tmp_path):
    words = ["+clipx=grpo", "clipx.clip_high=1.0,2.0"]
    replayed = clipx("replay", run, *words, "--match", "clip_fraction=0.04", "--json")
    (match,) = json.loads(replayed.stdout)["matches"]
    options = ["--replay", "+clipx=acpo clipx.alpha=2", "--match", f"clip_fraction=0.04 {' '.join(words)}"]
    result = clipx("report", run, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text().replace("<wbr>", "").replace("\u202f", " ")
    assert f"The closest reachable clip_fraction to 0.04 is {match['reached']:.4g}, under {match['setting']}." in page
    assert f"to {match['beyond']:.4g} on the other side. Exact: every token of the step is traced." in page
    assert match["low"] is None and f"under {match['setting']}" in page
    tokens = pandas.read_csv(tmp_path / "out" / "tokens.csv")
    assert f"{match['setting']}: weight" in tokens and "acpo alpha=2: weight" in tokens
    # Of all updates of the step, by the formulas.
    traced = read_shards(run / "traces", shards_in(run / "traces")).to_pandas()
    clipped = traced.region.isin(["LN", "HP"])
    mass = (traced.ratio * traced.advantage).abs()
    assert f"Clipping took {100 * mass[clipped].sum() / mass.sum():.2f} % of the gradient’s mass" in page
    alpha = json.loads(clipx("replay", run, "+clipx=acpo", "clipx.alpha=2", "--json").stdout)["settings"][0]
    assert f"acpo alpha=2 would have given a gradient to {alpha['regained']} of the {clipped.sum()} traced" in page


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("", "--match"),
        ("clip=0.1 +clipx=acpo clipx.alpha=0.0,4", "--match clip=0.1: must be clip_fraction=NUMBER"),
        ("clip_fraction=0.1", "name what to replay"),
        ("clip_fraction=0.1 +clipx=acpo clipx.alpha=2", "with the ends of its range"),
    ],
)
def test_a_match_that_says_too_little_is_an_error(run, tmp_path, match, message):
    result = clipx("report", run, "--out", tmp_path / "out", "--match", match)
    assert result.exit_code == 1 and message in " ".join(result.output.split()) and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [("+clipx=nothing", "nothing"), ("clipx.alpha=1", "clipx.alpha=1"), ("+clipx=acpo clipx.alpha=-1", "alpha")],
)
def test_wrong_words_are_an_error(run, tmp_path, words, message):
    result = clipx("report", run, "--out", tmp_path / "out", "--replay", words)
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output
    assert not (tmp_path / "out" / "report.html").exists()


def test_without_traces_it_says_how_to_get_them(tmp_path):
    run = write_run(tmp_path / "run", "grpo", traced=False, steps=1)
    result = clipx("report", run, "--out", tmp_path / "out", "--replay", "+clipx=acpo")
    assert result.exit_code == 1 and "+clipx/trace=prompts" in result.output
