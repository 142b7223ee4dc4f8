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

from verl_clipx.losses.applying.compiled import TokenFunctions, pad_to_parts, token_functions
from verl_clipx.losses.applying.loss import token_statistics
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.contract.contract import compiled_loss_is_the_same
from verl_clipx.losses.methods import BUILT_IN, METHODS, Method
from verl_clipx.losses.modifiers import AdvantageReweighting, FutureInfluence

SHAPES = [(1, 1), (1, 7), (5, 5), (64, 33)]
REWEIGHTED = AdvantageReweighting(alpha=0.3)


def micro_batch(method: Method, sequences: int, length: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Ragged sequences with ratios on both sides of the bounds; advantages with a stride of 0."""
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
        new.to(dtype),
        old.to(dtype),
        advantages.to(dtype).expand(-1, length),
        torch.arange(length) < lengths,
        **{name: optional[name] for name in method.asks_for},
    )


@pytest.fixture
def recorded(compile_by) -> CompileCounterWithBackend:
    """A compiler that records its graphs and runs them as they are."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_by(counter)
    return counter


def warnings_of(caplog) -> list[str]:
    """What the plugin said."""
    return [record.getMessage() for record in caplog.records if record.name == "verl_clipx.losses.applying.compiled"]


def both(functions: TokenFunctions, inputs: Inputs) -> list[Tensor]:
    """Statistics, and what the loss makes of them."""
    statistics = functions.statistics(inputs)
    return [statistics, *functions.loss(inputs, functions.method.decide(statistics))]


def both_ways(name: str) -> tuple[Method, TokenFunctions, TokenFunctions]:
    """A method with its defaults, compiled and as it is."""
    method = METHODS[name]()
    return method, *(TokenFunctions(method, None, compiled=compiled) for compiled in (True, False))


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-6, atol=1e-6)


# One method for each form of statistics: sums for each bin, tables, a mean that is compared with a threshold, none.
ONE_OF_EACH_FORM = ("acpo", "bapo", "m2po", "grpo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_OF_EACH_FORM else pytest.mark.matrix) for name in BUILT_IN]
)
def test_one_graph_each_whatever_the_inputs_look_like(name, recorded, caplog):
    method, functions, eager = both_ways(name)
    functions.prepare("cpu", counted=False)
    made = recorded.frame_count
    assert made == 1 + bool(method.statistics_size) + bool(method.second_statistics_size)
    for shape in SHAPES:
        inputs = micro_batch(method, *shape, torch.bfloat16 if shape == SHAPES[-1] else torch.float32)
        expected = both(eager, inputs)
        transposed = inputs._replace(log_prob=inputs.log_prob.T.contiguous().T, mask=inputs.mask.T.contiguous().T)
        learning = inputs._replace(log_prob=inputs.log_prob.clone().requires_grad_(True))
        for given, grad in ((inputs, False), (transposed, True), (learning, True)):
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=grad):
                assert_all_close(both(functions, given), expected)
    assert recorded.frame_count == made
    for dtype in (torch.float64, torch.float32):
        both(functions, micro_batch(method, 4, 9, dtype))
    assert recorded.frame_count <= made + 2
    assert not warnings_of(caplog)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if METHODS[name]().statistics_size])
def test_sequences_padded_to_whole_parts_have_the_same_statistics(name):
    method = METHODS[name]()
    inputs = micro_batch(method, 4, 1030)
    padded = pad_to_parts(inputs)
    assert padded.mask.shape == (4, 2048)
    expected = token_statistics(method, None, inputs)
    assert_close(token_statistics(method, None, padded), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "shaping"), [("bapo", None), ("dro", None), *((name, REWEIGHTED) for name in ("dcpo", "dgpo"))]
)
def test_parameters_are_constants_of_the_graph(name, shaping, recorded):
    # As inputs they would be float64, and so would all that is computed with them.
    functions = TokenFunctions(METHODS[name](), shaping, compiled=True)
    both(functions, micro_batch(functions.method, 4, 9))
    for graph in recorded.graphs:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        assert not [one for one in inputs if isinstance(one, float | torch.SymFloat)]
        numbers = [one for one in inputs if isinstance(one, Tensor) and one.is_floating_point() and one.ndim == 0]
        assert not numbers


@pytest.mark.slow
def test_acpos_statistics_hold_no_scattered_sum(recorded):
    # Such sums add in the order in which threads come. Those of the other methods are of whole numbers.
    functions = TokenFunctions(METHODS["acpo"](), None, compiled=True)
    functions.statistics(micro_batch(functions.method, 4, 9))
    (graph,) = recorded.graphs
    called = [str(node.target) for node in graph.graph.nodes]
    assert "sum" in called
    assert not [name for name in called if any(word in name for word in ("scatter", "index_add", "index_put"))]


@pytest.mark.slow
def test_many_configurations_in_one_process(recorded, caplog):
    # The compiler allows eight graphs of one function, and here two.
    with torch._dynamo.config.patch(recompile_limit=2):
        for index in range(3):
            functions = TokenFunctions(METHODS["grpo"](clip_high=1.2 + index / 10), None, compiled=True)
            both(functions, micro_batch(functions.method, 4, 9))
            assert recorded.frame_count == index + 1
    assert not warnings_of(caplog)


def test_loptis_tokens_are_another_input_of_the_same_graphs(recorded):
    method, functions, eager = both_ways("acpo")
    functions.prepare("cpu", counted=True)
    inputs = micro_batch(method, 6, 20)
    inputs = inputs._replace(counted=inputs.mask & (inputs.old_log_prob < -1))
    assert_all_close(both(functions, inputs), both(eager, inputs))
    assert recorded.frame_count == 2


# A graph takes seconds to make, so that all which needs the real compiler's stands in one test for each.
# The first has an optional input, the rollout's log-probabilities, in its statistics.
REAL = [
    pytest.param(METHODS["bapo"](weight="rollout"), FutureInfluence(half_life=2), id="bapo, by the rollout, with fipo"),
    pytest.param(METHODS["acpo"](), AdvantageReweighting(probability="current"), id="acpo, reweighted"),
]
OTHERS = [pytest.param(METHODS[name](), None, id=name, marks=pytest.mark.matrix) for name in BUILT_IN if name != "acpo"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "shaping"), [*REAL, *OTHERS])
def test_the_real_compilers_results(method, shaping):
    torch._dynamo.reset()
    token_functions.cache_clear()
    functions, eager = (token_functions(method, shaping, compiled=compiled) for compiled in (True, False))
    compiled_loss_is_the_same(method, shaping)
    inputs = micro_batch(method, 24, 53)
    whole = functions.statistics(inputs)
    assert_all_close(both(functions, inputs), both(eager, inputs))
    for _ in range(3):
        assert torch.equal(functions.statistics(inputs), whole)
    # Rows in parts as micro-batches have them, each as wide as its longest response.
    for size in (1, 5, 7):
        parts = [narrowed(inputs, rows) for rows in torch.arange(24).split(size)]
        split = sum_statistics(functions, parts)
        assert_close(method.decide(split), method.decide(whole), rtol=1e-12, atol=1e-12)
    assert functions.compiled


def sum_statistics(functions: TokenFunctions, parts: list[Inputs]) -> Tensor:
    """The statistics of micro-batches, whose second stage is about the sums of the first."""
    statistics = sum(functions.statistics(part) for part in parts)
    if not functions.method.second_statistics_size:
        return statistics
    first = statistics[: functions.method.statistics_size]
    return sum(functions.statistics(part, first) for part in parts)


def narrowed(inputs: Inputs, rows: Tensor) -> Inputs:
    """Some rows, without columns that none of them needs."""
    width = int(inputs.mask[rows].sum(1).max())
    return Inputs(*(None if values is None else values[rows][:, :width] for values in inputs))


@pytest.mark.parametrize("when", ["made", "run"])
def test_a_compiler_that_fails_costs_one_warning(when, monkeypatch, caplog):
    def fails(*arguments, **options):
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(torch, "compile", fails if when == "made" else lambda function, **options: fails)
    method = METHODS["acpo"]()
    with caplog.at_level(logging.WARNING):
        functions = TokenFunctions(method, None, compiled=True)
        functions.prepare("cpu", counted=False)
        inputs = micro_batch(method, 4, 9)
        found = both(functions, inputs)
    assert all(map(torch.equal, found, both(TokenFunctions(method, None, compiled=False), inputs)))
    (warning,) = warnings_of(caplog)
    assert "acpo" in warning and "no C++ compiler found" in warning
    # An error of the compiled function, such as a lack of memory, is not the compiler's.
    assert "the compiler, or what it compiled, failed" in warning
    assert not functions.compiled
