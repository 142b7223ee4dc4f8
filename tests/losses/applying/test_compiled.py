"""What torch.compile makes of the formulas: how many graphs, of which operations, with which results. Graphs are
counted with a backend that only records; the results are the real compiler's. Not covered: accelerators; times
(benchmarks/loss.py); a training under compile=true (tests/end_to_end/test_training.py).
"""

import logging

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from tests.messages import assert_names
from verl_clipx.losses.applying.compiled import TokenFunctions, pad_to_parts, token_functions
from verl_clipx.losses.applying.loss import token_statistics
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.contract.contract import compiled_loss_is_the_same
from verl_clipx.losses.methods import BUILT_IN, METHODS, Method
from verl_clipx.losses.modifiers import AdvantageReweighting, FutureInfluence


def make_micro_batch(method: Method, sequences: int, length: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return ragged sequences with ratios on both sides of the bounds; advantages with a stride of 0."""
    generator = torch.Generator().manual_seed(sequences * length)
    old = -4 * torch.rand(sequences, length, generator=generator, dtype=torch.float64)
    new = old + 0.3 * torch.randn(sequences, length, generator=generator, dtype=torch.float64)
    advantages = torch.randn(sequences, 1, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (sequences, 1), generator=generator)
    optional = {
        "rollout_log_prob": (old + 0.01).to(dtype),
        "entropy": torch.rand(sequences, length, generator=generator).to(dtype),
        "group": torch.arange(sequences) // 2,
    }
    return Inputs(
        log_prob=new.to(dtype),
        old_log_prob=old.to(dtype),
        advantages=advantages.to(dtype).expand(-1, length),
        mask=torch.arange(length) < lengths,
        **{name: optional[name] for name in method.asks_for},
    )


@pytest.fixture
def recorder(compile_by) -> CompileCounterWithBackend:
    """A compiler that records its graphs and runs them as they are."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_by(counter)
    return counter


def get_warnings(caplog) -> list[str]:
    """Return what was logged where losses are compiled."""
    return [record.getMessage() for record in caplog.records if record.name == "verl_clipx.losses.applying.compiled"]


def apply(functions: TokenFunctions, inputs: Inputs) -> list[Tensor]:
    """Return a method's statistics, and what its loss returns with the decision that follows from them."""
    statistics = functions.statistics(inputs)
    return [statistics, *functions.loss(inputs, functions.method.decide(statistics))]


def assert_all_close(tensors: list[Tensor], expected_tensors: list[Tensor]) -> None:
    for tensor, expected in zip(tensors, expected_tensors, strict=True):
        assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


# One method for each form of statistics: sums for each bin, tables, a mean that is compared with a threshold, none.
ONE_OF_EACH_FORM = ("acpo", "bapo", "m2po", "grpo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_OF_EACH_FORM else pytest.mark.matrix) for name in BUILT_IN]
)
def test_one_graph_each_whatever_the_inputs_look_like(name, recorder, caplog):
    method = METHODS[name]()
    functions = TokenFunctions(method, None, compiled=True)
    eager = TokenFunctions(method, None, compiled=False)
    functions.prepare("cpu", counted=False)
    graphs = recorder.frame_count
    assert graphs == 1 + bool(method.statistics_size) + bool(method.second_statistics_size)
    for sequences, length, dtype in (
        (1, 1, torch.float32),
        (1, 7, torch.float32),
        (5, 5, torch.float32),
        (64, 33, torch.bfloat16),
    ):
        inputs = make_micro_batch(method, sequences, length, dtype)
        expected = apply(eager, inputs)
        transposed = inputs._replace(log_prob=inputs.log_prob.T.contiguous().T, mask=inputs.mask.T.contiguous().T)
        with_gradient = inputs._replace(log_prob=inputs.log_prob.clone().requires_grad_(True))
        with torch.no_grad():
            assert_all_close(apply(functions, inputs), expected)
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert_all_close(apply(functions, transposed), expected)
            assert_all_close(apply(functions, with_gradient), expected)
    assert recorder.frame_count == graphs
    for dtype in (torch.float64, torch.float32):
        apply(functions, make_micro_batch(method, 4, 9, dtype))
    assert recorder.frame_count <= graphs + 2
    assert not get_warnings(caplog)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if METHODS[name]().statistics_size])
def test_sequences_padded_to_whole_parts_have_the_same_statistics(name):
    method = METHODS[name]()
    inputs = make_micro_batch(method, 4, 1030)
    padded = pad_to_parts(inputs)
    assert padded.mask.shape == (4, 2048)
    expected = token_statistics(method, None, inputs)
    assert_close(token_statistics(method, None, padded), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "shaping"),
    [
        ("bapo", None),
        ("dro", None),
        ("dcpo", AdvantageReweighting(alpha=0.3)),
        ("dgpo", AdvantageReweighting(alpha=0.3)),
    ],
)
def test_parameters_are_constants_of_the_graph(name, shaping, recorder):
    # As inputs they would be float64, and so would all that is computed with them.
    functions = TokenFunctions(METHODS[name](), shaping, compiled=True)
    apply(functions, make_micro_batch(functions.method, 4, 9))
    for graph in recorder.graphs:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert not [value for value in inputs if is_float(value)]


def is_float(value: object) -> bool:
    """Return whether an input of a graph is one floating-point number, as a number or as a tensor."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.ndim == 0
    return isinstance(value, float | torch.SymFloat)


@pytest.mark.slow
def test_acpos_statistics_hold_no_scattered_sum(recorder):
    # Such sums add in the order in which threads come. Those of the other methods are of whole numbers.
    functions = TokenFunctions(METHODS["acpo"](), None, compiled=True)
    functions.statistics(make_micro_batch(functions.method, 4, 9))
    (graph,) = recorder.graphs
    called = [str(node.target) for node in graph.graph.nodes]
    assert "sum" in called
    assert not [name for name in called if any(word in name for word in ("scatter", "index_add", "index_put"))]


@pytest.mark.slow
def test_each_of_many_configurations_in_one_process_gets_its_graph(recorder, caplog):
    # The compiler allows eight graphs of one function, and here two.
    with torch._dynamo.config.patch(recompile_limit=2):
        for index in range(3):
            functions = TokenFunctions(METHODS["grpo"](clip_high=1.2 + index / 10), None, compiled=True)
            apply(functions, make_micro_batch(functions.method, 4, 9))
            assert recorder.frame_count == index + 1
    assert not get_warnings(caplog)


def test_loptis_tokens_are_another_input_of_the_same_graphs(recorder):
    method = METHODS["acpo"]()
    functions = TokenFunctions(method, None, compiled=True)
    eager = TokenFunctions(method, None, compiled=False)
    functions.prepare("cpu", counted=True)
    inputs = make_micro_batch(method, 6, 20)
    inputs = inputs._replace(counted=inputs.mask & (inputs.old_log_prob < -1))
    assert_all_close(apply(functions, inputs), apply(eager, inputs))
    assert recorder.frame_count == 2


# The first has an optional input, the rollout's log-probabilities, in its statistics. The last takes half a minute.
CHOSEN = [
    pytest.param(METHODS["bapo"](weight="rollout"), None, id="bapo, by the rollout"),
    pytest.param(METHODS["grpo"](), FutureInfluence(half_life=2), id="grpo, with fipo"),
    pytest.param(METHODS["acpo"](), AdvantageReweighting(probability="current"), id="acpo, reweighted"),
    pytest.param(
        METHODS["bapo"](weight="rollout"),
        FutureInfluence(half_life=2),
        id="bapo, by the rollout, with fipo",
        marks=pytest.mark.matrix,
    ),
]
OTHERS = [pytest.param(METHODS[name](), None, id=name, marks=pytest.mark.matrix) for name in BUILT_IN if name != "acpo"]


# A graph takes seconds to make, so that all which needs the real compiler's stands in one test for each.
@pytest.mark.slow
@pytest.mark.parametrize(("method", "shaping"), [*CHOSEN, *OTHERS])
def test_the_real_compilers_results_are_the_eager_ones_alike_each_time_and_add_up_over_micro_batches(method, shaping):
    torch._dynamo.reset()
    token_functions.cache_clear()
    functions = token_functions(method, shaping, compiled=True)
    eager = token_functions(method, shaping, compiled=False)
    compiled_loss_is_the_same(method, shaping)
    inputs = make_micro_batch(method, 24, 53)
    statistics = functions.statistics(inputs)
    assert_all_close(apply(functions, inputs), apply(eager, inputs))
    for _ in range(3):
        assert torch.equal(functions.statistics(inputs), statistics)
    for sequences in (1, 5, 7):
        micro_batches = [select_sequences(inputs, rows) for rows in torch.arange(24).split(sequences)]
        sums = sum_statistics(functions, micro_batches)
        assert_close(method.decide(sums), method.decide(statistics), rtol=1e-12, atol=1e-12)
    assert functions.compiled


def sum_statistics(functions: TokenFunctions, micro_batches: list[Inputs]) -> Tensor:
    """Return the sum of micro-batches' statistics, whose second stage is about the sums of the first."""
    statistics = sum(functions.statistics(micro_batch) for micro_batch in micro_batches)
    if not functions.method.second_statistics_size:
        return statistics
    first = statistics[: functions.method.statistics_size]
    return sum(functions.statistics(micro_batch, first) for micro_batch in micro_batches)


def select_sequences(inputs: Inputs, rows: Tensor) -> Inputs:
    """Return some rows, as wide as the longest response among them."""
    width = int(inputs.mask[rows].sum(1).max())
    return Inputs(*(None if values is None else values[rows][:, :width] for values in inputs))


@pytest.mark.parametrize("when", ["made", "run"])
def test_a_compiler_that_fails_costs_one_warning(when, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise RuntimeError("no C++ compiler found")

    def compile_what_fails(function, **options):
        return fail

    monkeypatch.setattr(torch, "compile", fail if when == "made" else compile_what_fails)
    method = METHODS["acpo"]()
    with caplog.at_level(logging.WARNING):
        functions = TokenFunctions(method, None, compiled=True)
        functions.prepare("cpu", counted=False)
        inputs = make_micro_batch(method, 4, 9)
        results = apply(functions, inputs)
    expected_results = apply(TokenFunctions(method, None, compiled=False), inputs)
    assert all(map(torch.equal, results, expected_results))
    assert not functions.compiled
    (warning,) = get_warnings(caplog)
    # An error of the compiled function, such as a lack of memory, is not the compiler's.
    assert_names(warning, "acpo", "no C++ compiler found", "the compiler, or what it compiled, failed")
