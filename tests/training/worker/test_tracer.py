"""What is traced of a rollout batch, from the worker's calls to the files. Not covered: verl's engine and ranks
(tests/end_to_end/test_training.py), copies from an accelerator.
"""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy
import pandas
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu

from tests.host_syncs import counted_host_syncs
from tests.jagged import jagged, micro_batch, rollout_batch
from tests.training.worker.updates import loss_function, train
from verl_clipx.losses.applying.metrics import AGE_KEY_BY_SUM_KEY
from verl_clipx.losses.applying.token_trace import TokenTrace
from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.run.trace import Trace
from verl_clipx.run.trace_format import Shard, read_shards, regions_of, shards_in
from verl_clipx.training.worker.layout import AGE, TokenPass
from verl_clipx.training.worker.observe import observe_registered
from verl_clipx.training.worker.step import OptimizerStep
from verl_clipx.training.worker.trace_writer import TraceWriter
from verl_clipx.training.worker.tracer import ROW, Tracer, is_chosen, prompt_name

ROWS = [0, 1, 2, 3, 4]
TRACE = "+clipx/trace=prompts"
ACTOR = "actor_rollout_ref.actor"


def make_tracer(folder, *, rank=0, ranks=1, tokenizer=None, fraction=1, every=1, seed=0, **options):
    """A tracer of all prompts in every rollout batch, or as the arguments say."""
    trace = Trace(folder=str(folder), fraction=fraction, every=every, seed=seed)
    return Tracer(trace, rank=rank, ranks=ranks, tokenizer=tokenizer, **options)


def tokens_in(tracer) -> pandas.DataFrame:
    """All tokens that a tracer has written."""
    assert tracer.writer.flush()
    return read_shards(tracer.folder, shards_in(tracer.folder)).to_pandas()


def train_traced(config, tracer, *, correction_factor=None, batch=None):
    """Trains one update of one micro-batch, with an entropy, and returns its result.

    Args:
        config: of the actor.
        tracer: None: nothing is traced.
        correction_factor: makes rollout correction's weights of the old log-probabilities; None: there are none.
        batch: None: the example.
    """
    batch = batch or example()
    step = OptimizerStep()
    entropy = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(0))
    function = loss_function(config, step, [tracer] if tracer else [])

    def call_loss(model_output, data):
        if correction_factor is not None:
            data["rollout_is_weights"] = data["old_log_probs"] * correction_factor
        with rollout_batch(tracer, data) if tracer else nullcontext():
            result = function(model_output=model_output, data=data)
            if tracer:
                tracer.end_update(step)
        return result

    return train(call_loss, batch, [[ROWS]], entropy=entropy, reference=batch["old_log_prob"])


def assert_gradient(tokens, gradient):
    """What is traced as F and A is the gradient of token-mean over all tokens."""
    # Rows of a sequence are together in the trace.
    product = torch.tensor((tokens.weight * tokens.advantage).to_numpy(dtype=float))
    mask = example()["mask"]
    torch.testing.assert_close(product, -gradient.double()[mask] * int(mask.sum()), rtol=2e-5, atol=1e-6)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("method", BUILT_IN)
def test_the_traced_weight_is_the_losss(actor, tmp_path, method):
    tracer = make_tracer(tmp_path)
    result = train_traced(actor(f"+clipx={method}", TRACE), tracer)
    tokens = tokens_in(tracer)
    assert_gradient(tokens, result.gradient)
    for region, name in {"LN": "clip_fraction_low", "HP": "clip_fraction_high"}.items():
        assert (tokens.region == region).mean() == pytest.approx(result.metrics[f"clipx/{name}"], rel=1e-6)
    inside = (tokens.bounded <= tokens.high) & (tokens.bounded >= tokens.low)
    assert set(tokens.region[inside]) <= {"M"}


WITH_MODIFIERS = ("+clipx=acpo", TRACE, "+clipx/shaping=advantage_reweighting", "+clipx/select=high_entropy")


def test_modifiers_and_rollout_correction_are_traced_and_loss_and_graph_stay_the_same(actor, tmp_path, monkeypatch):
    # Half the tokens, averaged over all of them.
    config = actor(*WITH_MODIFIERS, "clipx.select.ratio=0.5", "clipx.select.normaliser=all")
    tracer = make_tracer(tmp_path)
    functions = config.policy_loss.clipx.functions("cpu")
    shapes_of_calls = []

    def record_calls(function):
        def call(inputs, *others):
            shapes_of_calls.append(inputs.mask.shape)
            return function(inputs, *others)

        return call

    for name in ("loss", "statistics"):
        monkeypatch.setattr(functions, name, record_calls(getattr(functions, name)))
    untraced = train_traced(config, None, correction_factor=-0.5)
    calls_without_trace = [*shapes_of_calls]
    shapes_of_calls.clear()
    traced = train_traced(config, tracer, correction_factor=-0.5)
    assert untraced.loss == traced.loss and torch.equal(untraced.gradient, traced.gradient)
    assert untraced.metrics == traced.metrics
    assert shapes_of_calls == calls_without_trace and len(shapes_of_calls) == 2
    tokens = tokens_in(tracer)
    assert_gradient(tokens, traced.gradient)
    assert not tokens.weight[~tokens.selected.astype(bool)].any() and 0.4 < tokens.selected.mean() < 0.7
    # Shaped, so no longer the same over a response.
    assert (tokens.groupby(["prompt", "sample"]).advantage.nunique() > 1).any()
    assert tokens.entropy.between(0, 1).all() and (tokens.entropy > 0).any()


@pytest.fixture
def observe_loss(actor, monkeypatch):
    """Returns a configuration under which one of verl's own losses is observed and traced."""
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))

    def build(loss_mode, *overrides):
        observe_registered(loss_mode)
        return actor("+clipx=observe", TRACE, f"{ACTOR}.policy_loss.loss_mode={loss_mode}", *overrides)

    return build


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean"])
def test_of_verls_loss_the_weight_is_told_by_its_gradient(observe_loss, tmp_path, loss_agg_mode):
    tracer = make_tracer(tmp_path)
    batch = example()
    batch["advantages"][2] = 0.0
    overrides = (f"{ACTOR}.loss_agg_mode={loss_agg_mode}", f"{ACTOR}.clip_ratio_high=0.28")
    train_traced(observe_loss("vanilla", *overrides), tracer, correction_factor=-0.5, batch=batch)
    tokens = tokens_in(tracer)
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    has_gradient = torch.where(batch["advantages"] > 0, ratio <= 1.28, (ratio >= 0.8) & (ratio <= 3))
    expected = (ratio * has_gradient * -0.5 * batch["old_log_prob"])[ROWS][batch["mask"][ROWS]]
    has_advantage = tokens.advantage != 0
    # Without an advantage there is no weight.
    assert 0 < has_advantage.mean() < 1 and not tokens.weight[~has_advantage].any()
    numpy.testing.assert_allclose(tokens.weight[has_advantage], expected.numpy()[has_advantage], rtol=1e-4, atol=1e-6)
    assert set(tokens.low) == {numpy.float32(0.8)} and set(tokens.high) == {numpy.float32(1.28)}
    assert tokens.entropy.notna().all() and tokens.rollout_log_prob.notna().all()


def test_a_loss_that_clips_sequences_is_bounded_by_theirs(observe_loss, tmp_path):
    tracer = make_tracer(tmp_path)
    train_traced(observe_loss("gspo"), tracer)
    responses = tokens_in(tracer).groupby(["prompt", "sample"])
    assert (responses.bounded.nunique() == 1).all() and (responses.ratio.nunique() > 1).any()


def seed_that_chooses_one_of_two_prompts():
    """A seed under which half of the example's two prompts is traced."""
    first, second = (prompt_name(numpy.zeros(length, dtype=numpy.int64)) for length in (1, 2))
    for seed in range(99):
        trace = Trace(fraction=0.5, seed=seed)
        if is_chosen(first, trace) and not is_chosen(second, trace):
            return seed
    raise AssertionError("no seed")


@pytest.mark.parametrize(("fraction", "over"), [(1, "sequence"), (0.5, "mini_batch")])
def test_one_host_sync_and_no_collective_with_everything_switched_on(actor, tmp_path, monkeypatch, fraction, over):
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(torch.distributed, name, mock.Mock(side_effect=AssertionError("a collective")))
    config = actor(*WITH_MODIFIERS, "+clipx/update=lopti", f"clipx.select.over={over}", f"{ACTOR}.use_kl_loss=True")
    batch = example()
    step = OptimizerStep(
        TokenPass("low", 0.25, True),
        counted_tokens=5.0,
        selected_tokens=torch.tensor(3.0),
        entropy_bucket=torch.tensor(7) if over == "mini_batch" else None,
    )
    seed = seed_that_chooses_one_of_two_prompts()
    for tracer in (None, make_tracer(tmp_path, fraction=fraction, seed=seed)):
        data, output = micro_batch(batch, ROWS, entropy=batch["entropy"], reference=batch["log_prob"])
        data[AGE] = torch.tensor([[0, 0], [1, 0], [2, 1], [3, 3], [4, 0]])
        function = loss_function(config, step, [tracer] if tracer else [])
        with rollout_batch(tracer, data) if tracer else nullcontext(), counted_host_syncs() as counter:
            _, metrics = function(model_output=output, data=data)
            if tracer:
                tracer.end_update(step)
        assert counter.callers.count("verl_clipx") == 1, list(zip(counter.calls, counter.callers, strict=True))
        # verl's own conversions wait in every sequence, so the count of its share is not the plugin's to promise.
        assert counter.callers.count("verl") > 1
        assert {*AGE_KEY_BY_SUM_KEY} <= metrics.keys()
        assert ("clipx/selected_fraction" in metrics) == (over == "mini_batch")
    assert tokens_in(tracer).prompt.nunique() == 2 * fraction


def test_prompts_are_chosen_by_their_hash():
    names = [prompt_name(numpy.arange(length)) for length in range(1, 2001)]
    assert len(set(names)) == 2000

    def choose(**trace):
        return {name for name in names if is_chosen(name, Trace(**trace))}

    for seed in (0, 1):
        # Five standard deviations of a binomial distribution.
        assert 133 < len(choose(fraction=0.1, seed=seed)) < 267
    assert choose(fraction=0.1, seed=0) != choose(fraction=0.1, seed=1)
    assert choose(fraction=0.1) < choose(fraction=0.2)
    assert all(is_chosen(name, Trace(fraction=1)) for name in names)
    # The same in other processes and versions: the trace of one run is compared with that of another.
    assert prompt_name(numpy.array([1, 2, 3])) == "77ba1ae68d5afbb4"
    assert prompt_name(numpy.array([1, 2, 3], dtype=numpy.int32)) == "77ba1ae68d5afbb4"


def make_batch(prompts, *, session=False, **fields):
    """A rollout batch with these prompts, a response of two tokens each."""
    rows = len(prompts)
    responses = jagged([torch.tensor([7, 8]) for _ in range(rows)])
    fields |= {
        "prompts": jagged([*map(torch.tensor, prompts)]),
        "responses": responses,
        "response_mask": responses * 0 + 1,
    }
    data = TensorDict(fields, batch_size=[rows])
    if session:
        tu.assign_non_tensor_stack(data, "session_id", list(range(rows)))
    return data


def trace_batch(tracer, data, updates=1, earlier_batches=0):
    """Traces a rollout batch, to which its updates add made-up numbers; verl counted some batches before it."""
    with rollout_batch(tracer, data, earlier_batches):
        for _ in range(updates):
            numbers = [] if ROW not in data else [int(getattr(row, "data", row)) for row in data[ROW]]
            responses = [tracer._responses[number] for number in numbers if number >= 0]
            if responses:
                zeros = torch.zeros(len(responses), 2)
                trace = TokenTrace(*[zeros] * len(TokenTrace._fields))
                tracer._keep({**trace._asdict(), "unshaped_advantage": zeros}, responses, number=0, decision=None)
            tracer.end_update(OptimizerStep())


def test_every_rank_chooses_the_same_prompts(tmp_path):
    prompts = [[number, 5] for number in range(40)]
    tracers = [make_tracer(tmp_path, rank=rank, ranks=2, fraction=0.4) for rank in range(2)]
    # The responses to each prompt are on both ranks.
    for tracer in tracers:
        trace_batch(tracer, make_batch([*prompts, *prompts]))
    tokens = pandas.concat([tokens_in(tracers[0]).query("rank == 0"), tokens_in(tracers[1]).query("rank == 1")])
    by_rank = tokens.groupby("rank").prompt.agg(set)
    assert by_rank[0] == by_rank[1] and 5 < len(by_rank[0]) < 30
    # No two responses to a prompt have one number.
    assert (tokens.groupby(["prompt", "sample"]).size() == 2).all()


class SentencePieceTokenizer:
    """Drops the space in front of a text, as SentencePiece's does."""

    calls = 0

    def decode(self, tokens, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        self.calls += 1
        return "".join(f" t{token}" for token in tokens).lstrip()


def test_what_the_batch_knows_of_a_response_is_written(tmp_path):
    scores = jagged([torch.tensor([0.0, 0.5]), torch.tensor([0.0, 1.0])])
    log_probs = jagged([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])])
    data = make_batch([[1], [1]], session=True, rm_scores=scores, rollout_log_probs=log_probs)
    tu.assign_non_tensor_stack(data, "extra_fields", [{"max_global_steps": 0}, {"max_global_steps": 2}])
    tokenizer = SentencePieceTokenizer()
    tracer = make_tracer(tmp_path, tokenizer=tokenizer)
    trace_batch(tracer, data, earlier_batches=2)
    tokens = tokens_in(tracer)
    assert tokens.text.tolist() == [" t7", " t8"] * 2 and set(tokens.prompt_text) == {"t1"}
    assert tokens["sample"].tolist() == [0, 0, 1, 1] and tokens.score.tolist() == [0.5, 0.5, 1, 1]
    assert tokens.age.tolist() == [2, 2, 0, 0] and tokens.position.tolist() == [0, 1, 0, 1]
    assert tokens.rollout_log_prob.tolist() == [-1, -2, -3, -4] and set(tokens.step) == {3}
    # The prompt of each response, and each of the two tokens once: with a neighbour and alone.
    trace_batch(tracer, data, earlier_batches=3)
    assert tracer.writer.flush() and tokenizer.calls == 2 * 2 + 2 * 2


def test_a_padded_batch_is_traced_as_a_jagged_one(tmp_path):
    data = TensorDict(
        {
            # Left padding, right padding; the last token of the second response is a tool's.
            # A row without tokens is left out.
            "prompts": torch.tensor([[0, 3], [4, 5], [6, 6]]),
            "responses": torch.tensor([[7, 8], [7, 9], [7, 9]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.25], [0.0, 0.75], [0.0, 0.0]]),
        },
        batch_size=[3],
    )
    tracer = make_tracer(tmp_path)
    trace_batch(tracer, data)
    tokens = tokens_in(tracer)
    assert tokens.token_id.tolist() == [7, 8, 7] and tokens.score.tolist() == [0.25, 0.25, 0.75]
    assert tokens.prompt.unique().tolist() == [prompt_name(numpy.array(ids)) for ids in ([3], [4, 5])]
    assert tokens.text.tolist() == ["[7]", "[8]", "[7]"] and tokens.prompt_text.isna().all()
    assert lists_of(tokens.context) == [[3], None, [4, 5]]


def lists_of(contexts):
    return [None if context is None else list(context) for context in contexts]


@dataclass(frozen=True, kw_only=True)
class TracedResponse:
    """A response to the prompt 5, 6 with the tokens 10 to 16, and what its trace must have for each token that counts.

    Args:
        mask: which tokens count.
        log_probs: of the rollout; None: it returned none. A tool's tokens have 0.
        contexts: the tokens between a token and the one before it, None if there are none.
        turns: the number of the turn.
    """

    mask: list[int]
    log_probs: list[int] | None
    contexts: list[list[int] | None]
    turns: list[int]


TRACED_RESPONSES = {
    "two turns, with a tool's two tokens between them and one after the last": TracedResponse(
        mask=[1, 1, 0, 0, 1, 1, 0],
        log_probs=[-1, -1, 0, 0, -1, -1, 0],
        contexts=[[5, 6], None, [12, 13], None],
        turns=[0, 0, 1, 1],
    ),
    "a tool speaks first": TracedResponse(
        mask=[0, 1, 0, 1, 1, 0, 1],
        log_probs=[0, -1, 0, -1, -1, 0, -1],
        contexts=[[5, 6, 10], [12], None, [15]],
        turns=[0, 1, 1, 2],
    ),
    # The second gap has a tool's token, too.
    "a rejection leaves out tokens that the policy sampled": TracedResponse(
        mask=[1, 0, 1, 0, 0, 1, 1],
        log_probs=[-1, -2, -1, -2, 0, -1, -1],
        contexts=[[5, 6], [11], [13, 14], None],
        turns=[0, 0, 1, 1],
    ),
    "without log-probabilities every gap is taken for a tool's": TracedResponse(
        mask=[1, 0, 1, 1, 1, 1, 1],
        log_probs=None,
        contexts=[[5, 6], [11], None, None, None, None],
        turns=[0, 1, 1, 1, 1, 1],
    ),
}


@pytest.mark.parametrize("response", TRACED_RESPONSES.values(), ids=TRACED_RESPONSES)
def test_what_stands_between_tokens_is_written_once_and_ends_a_turn_where_the_policy_did_not_sample_it(
    tmp_path, response
):
    ids = torch.arange(10, 17)
    rows = {"prompts": [5, 6], "responses": ids, "response_mask": response.mask}
    if response.log_probs is not None:
        rows["rollout_log_probs"] = response.log_probs
    fields = {name: jagged([torch.as_tensor(row)]) for name, row in rows.items()}
    batch = TensorDict(fields, batch_size=[1])
    tracer = make_tracer(tmp_path)
    with rollout_batch(tracer, batch):
        zeros = torch.zeros(1, len(ids))
        trace = TokenTrace(*[zeros] * len(TokenTrace._fields))
        columns = {**trace._asdict(), "unshaped_advantage": zeros}
        tracer._keep(columns, [tracer._responses[0]], number=0, decision=None)
        tracer.end_update(OptimizerStep())
    assert ROW in batch
    tokens = tokens_in(tracer)
    assert lists_of(tokens.context) == response.contexts and tokens.turn.tolist() == response.turns
    # With its context the whole sequence is there, up to its last token that counts.
    sequence = []
    for row in tokens.itertuples():
        sequence += [*(row.context if row.context is not None else ()), row.token_id]
    last = max(place for place, counts in enumerate(response.mask) if counts)
    assert sequence == [5, 6, *ids[: last + 1].tolist()]


def trace_batches(tracer, batches, updates=2, earlier_batches=0):
    """Traces rollout batches, and returns the step and the update of each file in the folder."""
    for number in range(earlier_batches, earlier_batches + batches):
        trace_batch(tracer, make_batch([[1]]), updates, number)
    assert tracer.writer.flush()
    return [(shard.step, shard.update) for shard in shards_in(tracer.folder)]


def test_every_so_many_steps_and_parts_of_a_step_go_on_counting_updates(tmp_path):
    every_third = trace_batches(make_tracer(tmp_path / "every", every=3), 7)
    assert every_third == [(1, 0), (1, 1), (4, 0), (4, 1), (7, 0), (7, 1)]
    two_a_step = trace_batches(make_tracer(tmp_path / "parts", batches_a_step=2, every=2), 5)
    assert two_a_step == [(1, 0), (1, 1), (1, 2), (1, 3), (3, 0), (3, 1)]


def test_a_resumed_run_keeps_what_came_before_and_another_run_in_the_folder_starts_anew(tmp_path):
    (tmp_path / "step_notes.parquet").write_text("nobody's trace")

    def shards_of_rank(rank):
        return [(shard.step, shard.update) for shard in shards_in(tmp_path) if shard.rank == rank]

    for rank in range(3):
        trace_batches(make_tracer(tmp_path, rank=rank, ranks=3), 4)
    written = Shard(2, 1, 0).path_in(tmp_path).stat().st_mtime_ns
    trace_batches(make_tracer(tmp_path, rank=0, ranks=3), 1, updates=1, earlier_batches=2)
    assert shards_of_rank(0) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]
    assert Shard(2, 1, 0).path_in(tmp_path).stat().st_mtime_ns == written
    trace_batches(make_tracer(tmp_path, rank=0, ranks=2), 1, updates=1)
    # Its own files and those of the rank that there is no more went; the other one takes care of its own.
    assert shards_of_rank(1) == [(step, update) for step in (1, 2, 3, 4) for update in (0, 1)]
    assert [shard for shard in shards_in(tmp_path) if shard.rank != 1] == [Shard(1, 0, 0)]
    assert (tmp_path / "step_notes.parquet").exists()


def test_the_last_rollout_batch_is_on_the_disk_when_training_ends_and_a_tracer_needs_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"clipx\.trace\.folder=None.*set it"):
        Tracer(Trace(), rank=0, ranks=1, tokenizer=None)
    tracer = make_tracer(tmp_path, batch_count=2)
    for number in range(2):
        trace_batch(tracer, make_batch([[1]]), earlier_batches=number)
    assert len(shards_in(tmp_path)) == 2


def test_a_token_takes_few_bytes(tmp_path):
    batch = {name: values.repeat(100, 1) for name, values in example().items()}
    tracer = make_tracer(tmp_path)
    data, _ = micro_batch(batch, list(range(400)))
    generator = torch.Generator().manual_seed(0)
    with rollout_batch(tracer, data):
        shape = len(tracer._responses), batch["mask"].shape[1]
        trace = TokenTrace(*(torch.randn(shape, generator=generator) for _ in TokenTrace._fields))
        columns = {**trace._asdict(), "unshaped_advantage": trace.advantage}
        tracer._keep(columns, tracer._responses, number=0, decision=None)
        tracer.end_update(OptimizerStep())
    assert tracer.writer.flush()
    (shard,) = shards_in(tmp_path)
    size = shard.path_in(tmp_path).stat().st_size
    # Eight columns that don't compress, four bytes each, and little more.
    assert size / int(batch["mask"][:400].sum()) < 60


# What is bounded, the bounds, the advantage, and the region.
REGIONS = pandas.DataFrame(
    [
        (0.7, 0.8, 1.2, -1, "LN"),
        (1.3, 0.8, 1.2, 1, "HP"),
        (0.7, 0.8, 1.2, 1, "LP"),
        (1.3, 0.8, 1.2, -1, "HN"),
        # Inside, equality, no advantage, no bound.
        (1.0, 0.8, 1.2, 1, "M"),
        (1.2, 0.8, 1.2, 1, "M"),
        (0.8, 0.8, 1.2, -1, "M"),
        (1.3, 0.8, 1.2, 0, "M"),
        (1e9, 0.0, numpy.inf, 1, "M"),
        # Bounds that cross: above wins, as in the metrics.
        (1.0, 1.1, 0.9, 1, "HP"),
        (1.0, 1.1, 0.9, -1, "HN"),
    ],
    columns=["bounded", "low", "high", "advantage", "region"],
)


def test_a_tokens_region():
    columns = [REGIONS[name].to_numpy(numpy.float32) for name in ("bounded", "low", "high", "advantage")]
    assert regions_of(*columns).tolist() == REGIONS.region.tolist()


# The thread that writes: order, too little room, a disk that fails or hangs. A process's end is not covered.


def test_what_does_not_fit_is_dropped_and_it_says_so_once(caplog):
    writer = TraceWriter(capacity=20_000_000)
    disk_is_free = threading.Event()
    written = []

    def write(name):
        disk_is_free.wait()
        written.append(name)

    # The first is larger than all room, and taken since nothing else waits.
    writer.put(partial(write, "first"), 30_000_000)
    for number in range(3):
        writer.put(partial(write, number), 1)
    writer.put(partial(write, "holds nothing"))
    assert writer.dropped == 3
    disk_is_free.set()
    assert writer.flush() and written == ["first", "holds nothing"]
    assert len(caplog.records) == 1 and "30 MB are waiting to be written" in caplog.text
    # Its room is free again, to the last byte and no further.
    disk_is_free.clear()
    for number, size in enumerate((10_000_000, 10_000_000, 1)):
        writer.put(partial(write, number), size)
    disk_is_free.set()
    assert writer.flush() and written[2:] == [0, 1]
    writer.close()
    assert len(caplog.records) == 2 and "4 updates were not traced" in caplog.text


def test_the_size_of_an_update_is_that_of_its_tokens(tmp_path, monkeypatch):
    tracer = make_tracer(tmp_path)
    sizes = []
    monkeypatch.setattr(tracer.writer, "put", lambda job, size=0: sizes.append(size))
    trace_batch(tracer, make_batch([[1], [2], [3]]))
    # Old files are removed, and then a float32 written for each of two tokens and each column; the advantage before
    # shaping has a column too.
    assert sizes == [0, 3 * 2 * (len(TokenTrace._fields) + 1) * 4]


def test_a_disk_that_hangs_holds_nobody_for_long():
    writer = TraceWriter()
    disk_is_free = threading.Event()
    writer.put(disk_is_free.wait)
    start = time.monotonic()
    assert not writer.flush(0.1) and not writer.flush(0.1)
    assert time.monotonic() - start < 60
    disk_is_free.set()
    assert writer.flush()


def test_a_wait_that_is_given_up_says_that_traces_may_be_lost(tmp_path, monkeypatch, caplog):
    tracer = make_tracer(tmp_path, batch_count=1)
    disk_is_free = threading.Event()
    flush = tracer.writer.flush
    monkeypatch.setattr(tracer.writer, "flush", lambda: flush(0.1))
    tracer.writer.put(disk_is_free.wait, 3_000_000)
    # A checkpoint, and then the run's last rollout batch.
    tracer.flush()
    trace_batch(tracer, make_batch([[1]]))
    disk_is_free.set()
    assert flush() and len(caplog.records) == 2
    for message in caplog.messages:
        assert "after 0.1 s the disk has not written all traces: 3 MB are waiting" in message
        assert "when the process ends are lost" in message


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("x")])
def test_a_failure_ends_the_tracing_says_so_once_and_does_not_end_the_training(tmp_path, monkeypatch, caplog, error):
    tracer = make_tracer(tmp_path)
    trace_batch(tracer, make_batch([[1]]))
    assert tracer.writer.flush()
    write_table = mock.Mock(side_effect=error)
    monkeypatch.setattr("pyarrow.parquet.write_table", write_table)
    for _ in range(2):
        trace_batch(tracer, make_batch([[1]]))
    assert tracer.writer.flush() and tracer.writer.is_off
    attempts = write_table.call_count
    trace_batch(tracer, make_batch([[1]]))
    assert tracer.writer.flush() and write_table.call_count == attempts
    # What was written stays, no part of a file besides.
    assert len(shards_in(tmp_path)) == 1 and len(list(tmp_path.iterdir())) == 1
    assert len(caplog.records) == 1 and caplog.records[0].exc_text
    assert "training goes on" in caplog.text and type(error).__name__ in caplog.text
