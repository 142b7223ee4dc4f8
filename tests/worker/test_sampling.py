"""clipx.precision: which sequences the extra pass takes, what is said of its error, and what the next one takes.

Covers: the real extra pass and planner over verl's own cut into micro-batches, fixed and dynamic, on one rank and on
several (threads that add up); the full pass where nothing is known, where there are few sequences and where no sample
suffices; precision=0 as without the key; the error against the textbook's for a mean, and for an own class; skipped
steps, checkpoints; what the worker logs; pipeline stages. Not covered: how often the error holds
(benchmarks/sampled_bounds.py), the real engine.
"""

import contextlib
import math
import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from tests.jagged import jagged
from verl_clipx.base.method import Bounds, Method
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.driver.config import Settings, build
from verl_clipx.loss.bounds import PROBES, bounds_difference
from verl_clipx.worker.extra_pass import extra_pass
from verl_clipx.worker.planner import StepPlanner
from verl_clipx.worker.sampling import GROUPS, LEAST, MARGIN, drawn, error_of_parts, next_share, standard_errors
from verl_clipx.worker.state import description, read_state, write_state
from verl_clipx.worker.step import OptimizerStep
from verl_clipx.worker.training_worker import ClipxTraining

SEQUENCES = 120
BY_ONE = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
CUTS = [
    {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8},
    {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 60},
    {"use_dynamic_bsz": True, "max_token_len_per_gpu": 100},
]


def mini_batch(sequences=SEQUENCES, spread=0.3, seed=0):
    """A mini-batch in verl's layout, which knows what the model would say of it."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (sequences,), generator=generator).tolist()
    old = [-2 * torch.rand(n, generator=generator) for n in lengths]
    moved = [one + spread * torch.randn(len(one), generator=generator) for one in old]
    ones = [torch.ones(n, dtype=torch.int64) for n in lengths]
    one_longer = [torch.zeros(n + 1, dtype=torch.int64) for n in lengths]
    fields = {
        "input_ids": jagged(one_longer),
        "prompts": jagged([torch.zeros(1, dtype=torch.int64) for _ in lengths]),
        "responses": jagged(ones),
        "response_mask": jagged(ones),
        "old_log_probs": jagged(old),
        "rollout_log_probs": jagged([one - 1e-3 for one in old]),
        "advantages": jagged([torch.randn(1, generator=generator).expand(n).clone() for n in lengths]),
        # The model's output for a response token stands one position to its left.
        "says": jagged([torch.cat([one, torch.zeros(1)]) for one in moved]),
        "number": torch.arange(sequences),
    }
    data = TensorDict(fields, batch_size=[sequences])
    total = sum(lengths)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=total, global_batch_size=sequences)
    return data


class Engine:
    """Cuts as verl's and says what the mini-batch knows; remembers which sequences it passed, how many at a time."""

    def __init__(self):
        self.module, self.seen, self.sizes = torch.nn.Linear(1, 1), [], []
        self.is_mp_src_rank_with_outputs = lambda: True
        self.get_data_parallel_rank, self.get_data_parallel_size = (lambda: 0), (lambda: 1)
        self.get_data_parallel_group = lambda: None
        self.optimizer_step, self.infer_batch = (lambda: 1.0), (lambda: None)

    def eval_mode(self, **_):
        return contextlib.nullcontext()

    def forward_backward_batch(self, data, loss_function, forward_only):
        assert forward_only
        for part in prepare_micro_batches(data)[0]:
            self.seen += part["number"].tolist()
            self.sizes.append(len(part))
            loss_function(model_output={"log_probs": part["says"]}, data=part)


class Rank:
    """The planner of one data-parallel rank, with its engine."""

    def __init__(self, settings, *, rank=0, ranks=1, all_reduce=lambda rank, vector: vector, cut=CUTS[1]):
        self.settings, self.engine, self.reductions = settings, Engine(), 0
        self._all_reduce, self._rank, self._cut = all_reduce, rank, cut
        self.planner = StepPlanner(
            settings, extra_pass=self.extra_pass, all_reduce=self.all_reduce, rank=rank, ranks=ranks
        )

    def all_reduce(self, vector):
        self.reductions += 1
        return self._all_reduce(self._rank, vector)

    def extra_pass(self, data, step):
        return extra_pass(self.settings, self.engine, data, step, cut=self._cut, device="cpu")

    def step(self, data, *, taken=True):
        """An update, as the training worker makes it; which sequences were passed is in `passed`."""
        before = len(self.engine.seen)
        step = self.planner.plan(data, position="update_1", token_pass=None, weights_moved=None)
        self.passed = self.engine.seen[before:]
        if step.collect:
            step.collected = exact(self.settings, data)
        self.planner.finish(step, taken=taken)
        return step


def exact(settings, data):
    """The statistics of all of a mini-batch's sequences, by the extra pass of precision=0."""
    cut = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(data)}
    return extra_pass(settings, Engine(), data, OptimizerStep(), cut=cut, device="cpu").statistics


def part_of(data, rows):
    return tu.index_select_tensor_dict(data, rows)


def settled(rank, share=0.6):
    """The rank, as if the latest update had said which share suffices."""
    rank.planner.state.shares["update_1"] = share
    return rank


def test_a_step_says_that_its_bounds_are_a_samples():
    data = mini_batch()
    sampled, whole = (Rank(build("acpo", precision=precision)) for precision in (0.03, 0))
    assert settled(sampled).step(data).decided_from is DecidedFrom.SAMPLE
    assert whole.step(data).decided_from is DecidedFrom.MINI_BATCH


@pytest.mark.parametrize("method", ["acpo", "bapo", "m2po"])
def test_the_sample_and_its_bounds_do_not_depend_on_micro_batches(method):
    behaviour = {"behaviour": "old"} if method == "m2po" else {}
    settings = build(method, precision=0.03, **behaviour)
    data = mini_batch()
    runs = [settled(Rank(settings, cut=cut)) for cut in (BY_ONE, *CUTS)]
    steps = [run.step(data) for run in runs]
    for run, step in zip(runs, steps, strict=True):
        assert set(run.passed) == set(runs[0].passed) and len(set(run.passed)) == 72
        assert step.decision.tolist() == pytest.approx(steps[0].decision.tolist(), rel=1e-12, abs=1e-12)
        assert step.predicted_error == pytest.approx(steps[0].predicted_error, rel=1e-9, abs=1e-12)
        assert step.passed == 0.6
    # 72 in micro-batches of at most 60 are 2 of 36.
    assert runs[2].engine.sizes == [36, 36]


def test_what_micro_batches_of_one_size_lack_passes_uncounted():
    settings, data = build("acpo", precision=0.03), mini_batch()
    whole, cut = (
        settled(Rank(settings, cut=CUTS[0] | {"micro_batch_size_per_gpu": size}), 73 / 120) for size in (120, 40)
    )
    first, second = whole.step(data), cut.step(data)
    assert whole.engine.sizes == [73] and cut.engine.sizes == [37, 37]
    assert first.statistics.tolist() == pytest.approx(second.statistics.tolist(), rel=1e-12, abs=1e-12)
    assert first.passed == second.passed == 73 / 120


class Ranks:
    """Threads in the place of ranks, whose sums wait for each other."""

    def __init__(self, settings, count):
        self.barrier, self.parts = threading.Barrier(count, timeout=60), [None] * count
        self.ranks = [Rank(settings, rank=k, ranks=count, all_reduce=self.all_reduce) for k in range(count)]

    def all_reduce(self, rank, vector):
        self.parts[rank] = vector
        self.barrier.wait()
        total = sum(self.parts)
        self.barrier.wait()
        return total

    def step(self, data):
        found = [None] * len(self.ranks)
        size = len(data) // len(self.ranks)

        def one(index):
            share = part_of(data, torch.arange(index * size, (index + 1) * size))
            found[index] = self.ranks[index].step(share)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_rank_takes_an_equal_share_and_all_decide_alike(count):
    settings, data = build("acpo", precision=0.03), mini_batch()
    ranks = Ranks(settings, count)
    for rank in ranks.ranks:
        settled(rank)
    first = ranks.step(data)
    taken = [rank.passed for rank in ranks.ranks]
    assert [len(rows) for rows in taken] == [72 // count] * count
    together = torch.tensor(sorted(row for rows in taken for row in rows))
    # The sample's sums, as many times as the mini-batch has its sequences.
    expected = exact(settings, part_of(data, together)) * (120 / 72)
    of_the_sample = settings.method.decide(expected)
    for step in first:
        assert torch.equal(step.decision, first[0].decision) and step.next_share == first[0].next_share
        assert step.decision.tolist() == pytest.approx(of_the_sample.tolist(), rel=1e-12)
        assert step.statistics.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)
    # Shares, and what the training pass found, go with the next numbers.
    second = ranks.step(data)
    expected = bounds_difference(settings.method, first[0].statistics, exact(settings, data))
    assert [step.error_before for step in second] == pytest.approx([expected] * count, rel=1e-9)
    assert 0 < expected < 1
    assert [rank.reductions for rank in ranks.ranks] == [2] * count


def test_everything_exact_whatever_the_ranks_while_nothing_is_known():
    settings, data = build("acpo", precision=0.03), mini_batch()
    whole = settings.method.decide(exact(settings, data))
    errors = []
    for count in (1, 2, 8):
        for step in Ranks(settings, count).step(data):
            assert step.passed == 1 and step.predicted_error == 0 and not step.collect
            assert step.decision.tolist() == pytest.approx(whole.tolist(), rel=1e-12)
            errors.append(step.next_share)
    # What the next one takes: half at least, by which groups the sequences are in.
    assert all(0.5 <= share <= 1 for share in errors)


def test_a_larger_error_takes_more_of_the_next_and_an_infinite_one_all():
    share = partial(next_share, sampled=100.0, sequences=1000.0, precision=0.03)
    # Of a population without end 100 sequences have 3 %, so MARGIN * 100 are planned, and fewer as 1000 are all.
    planned = MARGIN * 100
    assert share(0.03) == pytest.approx(1 / (1 / planned + 1 / 1000) / 1000)
    assert share(0.06) == pytest.approx(1 / (1 / (4 * planned) + 1 / 1000) / 1000)
    assert share(0.0) == share(1e-3) == 0.05
    assert share(math.inf) == share(math.nan) == 1


def test_shares_fall_by_half_an_update_down_to_what_suffices():
    # All ratios are 1, so that nothing is wrong with any sample.
    run, data = Rank(build("acpo", precision=0.03)), mini_batch(180, spread=0.0)
    steps = [run.step(data) for _ in range(3)]
    assert [step.passed for step in steps] == [1, 0.5, LEAST / 180]
    assert [step.predicted_error for step in steps] == [0, 0, 0]
    assert [step.error_before for step in steps] == [None, None, 0]


def test_where_no_sample_suffices_all_are_passed():
    run, data = Rank(build("acpo", precision=1e-6)), mini_batch()
    steps = [run.step(data) for _ in range(2)]
    assert [step.passed for step in steps] == [1, 1] and sorted(run.passed) == list(range(SEQUENCES))


def test_few_sequences_are_passed_as_without_the_key():
    data = mini_batch(LEAST - 1)
    cut = CUTS[2]
    run, without = settled(Rank(build("acpo", precision=0.03), cut=cut)), Rank(build("acpo"), cut=cut)
    step, other = run.step(data), without.step(data)
    assert torch.equal(step.statistics, other.statistics)
    assert (step.passed, step.predicted_error, step.next_share) == (1, 0, None)
    # On two ranks twice as many are not few.
    assert all(step.passed < 1 for step in _settled_ranks(2).step(mini_batch(2 * (LEAST - 1))))


def _settled_ranks(count):
    ranks = Ranks(build("acpo", precision=0.03), count)
    for rank in ranks.ranks:
        settled(rank)
    return ranks


@pytest.mark.parametrize("cut", CUTS)
def test_precision_0_is_the_pass_over_everything_to_the_last_bit(cut):
    settings, data = build("acpo"), mini_batch()
    run = settled(Rank(settings, cut=cut))
    step = run.step(data)
    assert sorted(run.passed) == list(range(SEQUENCES)) and not step.collect
    assert (step.sample, step.passed, step.predicted_error, step.next_share) == (None, None, None, None)
    copy = data.copy()
    tu.assign_non_tensor(copy, **cut)
    parts = [exact(settings, part) for part in prepare_micro_batches(copy)[0]]
    # In the engine's order, each micro-batch as a whole.
    expected = torch.zeros_like(parts[0])
    for part in parts:
        expected += part
    assert torch.equal(step.statistics, expected)


def test_other_updates_take_other_sequences_and_a_larger_share_the_same_ones():
    draw = partial(drawn, 100, rank=0, ranks=4)
    small, large, other = draw(0.2, seed="0/a"), draw(0.5, seed="0/a"), draw(0.2, seed="1/a")
    assert set(small.rows.tolist()) < set(large.rows.tolist())
    assert set(small.rows.tolist()) != set(other.rows.tolist()) != set(draw(0.2, seed="0/b").rows.tolist())
    assert set(small.rows.tolist()) != set(drawn(100, 0.2, rank=1, ranks=4, seed="0/a").rows.tolist())
    # Of four ranks' 80 sequences each group has two or three.
    every = torch.cat([drawn(100, 0.2, rank=rank, ranks=4, seed="0/a").group for rank in range(4)])
    assert set(torch.bincount(every, minlength=GROUPS).tolist()) == {2, 3}


@dataclass(frozen=True, kw_only=True)
class MeanRatio(Method):
    """An own class: an upper bound at the mean ratio, a lower one at 0."""

    @property
    def statistics_size(self):
        return 2

    def statistics(self, t):
        ratio = torch.where(t.mask, t.ratio.double(), 0.0)
        return torch.stack([t.mask.sum(dtype=torch.float64), ratio.sum()])

    def bounds(self, t, decision):
        return Bounds(0.0, decision[1] / decision[0])


def test_the_error_of_an_own_classs_mean_is_the_textbooks():
    means = 1 + torch.rand(GROUPS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = torch.stack([torch.full_like(means, 5.0), 5 * means], 1)
    found = standard_errors(MeanRatio(), groups, scale=3.0)
    assert found.shape == (2, 2, PROBES) and float(found[0].max()) == 0
    half_width = float(means.mean()) / 2
    expected = float(means.std()) / math.sqrt(GROUPS) / half_width
    assert found[1].unique().tolist() == pytest.approx([expected] * len(found[1].unique()), rel=1e-12)


def test_an_own_class_is_sampled():
    settings = Settings(method=MeanRatio(), precision=0.5)
    run, data = settled(Rank(settings)), mini_batch()
    first, second = run.step(data), run.step(data)
    assert first.passed == 0.6 and 0 < first.predicted_error < 0.5
    assert 0 < second.error_before < 5 * first.predicted_error


def test_bounds_that_move_in_steps_have_an_error_where_they_are_about_to_move():
    bapo = build("bapo", target=0.5, weight="none").method
    positive, negative = bapo._count("upper") + 1, -1

    def errors(scale):
        """By halves and by parts of groups whose negative contributions are 0.5 to 1.5 times scale, positive ones 1."""
        groups = torch.zeros(GROUPS, bapo.statistics_size, dtype=torch.float64)
        groups[:, positive] = 1.0
        groups[:, negative] = scale * torch.linspace(0.5, 1.49, GROUPS, dtype=torch.float64)
        return float(standard_errors(bapo, groups, scale=1.0).max()), error_of_parts(bapo, groups, scale=1.0)

    on_the_edge, near, far = errors(1.0), errors(0.75), errors(0.25)
    assert min(on_the_edge) > 0.1
    # No half of the groups moves the bounds, but a smaller sample might.
    assert near[0] == 0 and near[1] > 0.1
    assert far == (0, 0)


def test_a_skipped_step_says_nothing_of_the_next():
    run, data = settled(Rank(build("acpo", precision=0.03))), mini_batch()
    step = run.step(data, taken=False)
    assert run.planner.state.shares == {"update_1": 0.6} and step.next_share != 0.6
    run.step(data)
    assert run.planner.state.shares["update_1"] != 0.6


def test_a_checkpoint_keeps_what_suffices(tmp_path):
    run, resumed, data = Rank(build("acpo", precision=0.03)), Rank(build("acpo", precision=0.03)), mini_batch()
    run.step(data)
    write_state(tmp_path, run.planner.state, description(run.planner.method))
    resumed.planner.restore(read_state(tmp_path, description(run.planner.method)))
    steps = run.step(data), resumed.step(data)
    assert torch.equal(steps[0].decision, steps[1].decision) and run.passed == resumed.passed
    assert steps[0].passed == steps[1].passed < 1


class VerlsWorker:
    """What the plugin's part of a worker needs of verl's: one rank, two updates on one mini-batch."""

    rank, model_config = 0, {}

    def __init__(self, config, **engine_config):
        self.engine = Engine()
        self.engine_config = SimpleNamespace(use_fused_kernels=False, max_token_len_per_gpu=None, **engine_config)
        self.set_loss_fn(partial(ppo_loss, config=config))

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def train_batch(self, data):
        part = data.copy()
        _, metrics = self.loss_fn(model_output={"log_probs": part["says"].clone()}, data=part)
        found = {key: value.aggregate() for key, value in metrics.items() if key.startswith("clipx")}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": found})

    def train_mini_batch(self, data):
        every = [tu.get(self.train_batch(data.clone()), "metrics") for _ in range(2)]
        merged = {key: [one[key] for one in every if key in one] for one in every for key in one}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": merged})


class Worker(ClipxTraining, VerlsWorker):
    """Ours on top of it."""


CUT = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 20}


def test_the_worker_logs_share_and_errors_under_the_key_only(actor, monkeypatch):
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")
    data, found = mini_batch(), []
    for precision in ("0", "0.5"):
        worker = Worker(actor("+clipx=acpo", f"clipx.precision={precision}", "clipx.receipt=off"), **CUT)
        found.append([tu.get(worker.train_mini_batch(data.clone()), "metrics") for _ in range(2)])
    keys = ["clipx/sampled_fraction", "clipx/bounds_error/predicted", "clipx/bounds_error/real"]
    assert not [key for metrics in found[0] for key in keys if key in metrics]
    first, second = ([metrics.get(key) for key in keys] for metrics in found[1])
    # Without fingerprints that are equal no update's ratio is 1 by definition.
    assert first == [[1.0, 1.0], [0.0, 0.0], None]
    assert all(LEAST / SEQUENCES <= share < 1 for share in second[0])
    assert all(0 < error < 0.5 for error in second[1])
    # The first update's, with the second one.
    (real,) = second[2]
    assert 0 < real < 1


def test_pipeline_stages_are_refused(actor, monkeypatch):
    monkeypatch.setattr("verl_clipx.worker.training_worker.get_device_id", lambda: "cpu")
    config = actor("+clipx=acpo", "clipx.precision=0.03")
    with pytest.raises(ValueError, match=r"clipx\.precision=0\.03 with pipeline_model_parallel_size=2: only the last"):
        Worker(config, pipeline_model_parallel_size=2, **CUT)
    Worker(config, pipeline_model_parallel_size=1, **CUT)
