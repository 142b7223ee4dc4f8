"""Where the ratio comes from, of the traced tokens, on the page of `clipx report`.

Covers: parts of known size by age, runs without the rollout's log-probabilities, bypass mode, numbers that are not
finite. Not covered: how the figure looks.
"""

import re

import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import WHOLE, write_run
from verl_clipx.cli import app
from verl_clipx.common.traces import read_shards, shards_in, write_shard

ENGINES, OLDER, UPDATES = 0.01, 0.3, 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "grpo-seed1", "grpo", steps=2)


def page(run, out, fields):
    """The page after fields of every traced token, in order, were replaced; `fields` gets the old log-probability."""
    for shard in shards_in(run / "traces"):
        columns = read_shards(run / "traces", [shard]).drop_columns(["step", "update", "rank"]).to_pydict()
        given = [fields(index, old) for index, old in enumerate(columns["old_log_prob"])]
        write_shard(run / "traces", shard, columns | {key: [row[key] for row in given] for key in given[0]}, WHOLE)
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return (out / "report.html").read_text()


def decoupled(index, old):
    older = int(index % 3 == 0)
    rollout = old + (OLDER if older else ENGINES) * (-1) ** (index // 3)
    return {"log_prob": old - UPDATES, "rollout_log_prob": rollout, "age": older}


@pytest.mark.slow
def test_each_part_has_the_size_that_its_tokens_have(run, tmp_path):
    found = re.search(r"Quantiles of the parts, in nats\. ([^<\"]+)\.", page(run, tmp_path, decoupled))
    assert found.group(1).split("; ") == [
        "old / rollout, age 0: 0.01, 0.01, 0.01, 0.01",
        "old / rollout, older: 0.3, 0.3, 0.3, 0.3",
        "current / old: 0.1, 0.1, 0.1, 0.1",
        "current / rollout: 0.11, 0.4, 0.4, 0.4",
    ]
    assert "ratio_parts_0" in "".join(path.name for path in (tmp_path / "figures").iterdir())


@pytest.mark.slow
def test_tokens_of_unknown_age_are_not_called_fresh_and_what_is_not_finite_is_left_out(run, tmp_path):
    def unknown(index, old):
        rollout = float("-inf") if index % 3 == 0 else old + ENGINES
        return {"log_prob": old - UPDATES, "rollout_log_prob": rollout, "age": None}

    text = page(run, tmp_path, unknown)
    assert "old / rollout, older: 0.01, 0.01, 0.01, 0.01; current / old" in text and "age 0: " not in text


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["none", "the old ones"])
def test_where_the_parts_are_not_known_apart_there_is_no_figure(run, tmp_path, rollout):
    def fields(index, old):
        return {"log_prob": old - UPDATES, "rollout_log_prob": None if rollout == "none" else old, "age": 0}

    assert "Where the ratio comes from" not in page(run, tmp_path, fields)
