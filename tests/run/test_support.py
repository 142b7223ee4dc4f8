"""What has run where, as explain, support.md, README and testing.md's goals say it, of CPUs and of a card that does not
exist; and what of verl's options only a worker can see. Not covered: that what is said to run does (the tests that
docs/results/cpu/tests.json names); what writes a card's file (tests/benchmarks/test_gpu_command.py).
"""

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.engine import FSDPTurboEngineWithLMHead

from tests.claims.configuration import ACTOR, decide
from tests.composition import composition
from tests.end_to_end.runs import common_overrides
from tests.hydra_main import NEEDED, explained
from verl_clipx.common.files import read_json, write_json
from verl_clipx.run import support
from verl_clipx.run.keys import READ
from verl_clipx.run.support import untested
from verl_clipx.training.worker.extra_pass import refuse_attention_on_a_slice
from verl_clipx.training.worker.state import state_rank

REPOSITORY = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
MODELS = FIXTURES / "models"
MADE_UP_CARD = FIXTURES / "made_up_card.json"

STRATEGY = f"{ACTOR}.strategy"
ROLLOUT_NAME = "actor_rollout_ref.rollout.name"
ESTIMATOR = "algorithm.adv_estimator"
MODEL_PATH = "actor_rollout_ref.model.path"
BYPASS = "algorithm.rollout_correction.bypass_mode"
MEGATRON = f"{STRATEGY}=megatron"
OTHER_DEVICES = "other devices than cuda and cpu"
REPLAY_UNDER_MEGATRON = "router replay under Megatron"
# A run all of whose options tests ran.
TESTED_RUN = (
    f"{STRATEGY}=fsdp2",
    f"{ROLLOUT_NAME}=vllm",
    f"{ESTIMATOR}=grpo",
    f"{MODEL_PATH}={MODELS / 'tied'}",
)


@pytest.mark.parametrize(
    ("overrides", "untested_options"),
    [
        ((), []),
        ((f"{ROLLOUT_NAME}=cpu",), []),
        ((f"{ESTIMATOR}=rloo",), []),
        (("trainer.use_v1=False",), []),
        ((f"{BYPASS}=True",), []),
        ((f"{STRATEGY}=fsdp",), []),
        (("algorithm.filter_groups.enable=True",), []),
        ((MEGATRON,), [MEGATRON]),
        ((f"{ROLLOUT_NAME}=sglang",), [f"{ROLLOUT_NAME}=sglang"]),
        ((f"{ESTIMATOR}=optimal_token_baseline",), [f"{ESTIMATOR}=optimal_token_baseline"]),
        ((f"{ACTOR}.qat.enable=True",), ["QAT"]),
        ((f"{MODEL_PATH}={MODELS / 'of_images'}",), ["images and videos"]),
        ((f"{BYPASS}=True", "trainer.use_v1=False"), ["bypass mode, v0 trainer"]),
        (("trainer.device=npu",), [OTHER_DEVICES]),
        (("trainer.device=xpu",), [OTHER_DEVICES]),
        (("trainer.device=cpu",), []),
        ((MEGATRON, f"+{ACTOR}.megatron.router_replay.mode=R2"), [MEGATRON, REPLAY_UNDER_MEGATRON]),
        ((MEGATRON, f"+{ACTOR}.megatron.router_replay.mode=R3"), [MEGATRON, REPLAY_UNDER_MEGATRON]),
        ((MEGATRON, f"+{ACTOR}.megatron.router_replay.mode=disabled"), [MEGATRON]),
    ],
)
def test_an_option_that_no_test_ran_is_named(overrides, untested_options):
    _, decision = decide("+clipx=grpo", *TESTED_RUN, *overrides)
    assert list(decision.record.untested) == untested_options
    if untested_options:
        assert f"; no test has run {', '.join(untested_options)}; ratio to the policy " in decision.record.line
    else:
        assert "no test" not in decision.record.line


@pytest.fixture
def card(tmp_path, monkeypatch):
    """The results of a card that does not exist, beside those of CPUs."""
    for kind in ("cpu", "gpu"):
        shutil.copytree(support.RESULTS / kind, tmp_path / kind, ignore=shutil.ignore_patterns("*.md"))
    shutil.copy(MADE_UP_CARD, tmp_path / "gpu")
    monkeypatch.setattr(support, "RESULTS", tmp_path)
    return read_json(MADE_UP_CARD)


def marked(page: str, mark: str) -> list[str]:
    """What stands between a mark and its end on a page."""
    return re.findall(rf"<!-- {mark} -->\s*(.*?)\s*<!-- end -->", (REPOSITORY / page).read_text("utf-8"), re.DOTALL)


@pytest.fixture
def tables():
    return SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "key_tables.py")))


def test_pages_say_what_the_files_say(tables):
    assert marked("docs/support.md", "options") == [tables.device_table()]
    assert marked("docs/dev/testing.md", "goals") == [tables.measured_goals()]
    assert {page: {*marked(page, "devices")} for page in ("README.md", "README.zh.md")} == {
        page: {names} for page, names in tables.device_names().items()
    }


@pytest.fixture
def options_on_cpus():
    """The options of the CPUs' record by name, each with its outcome and, if it was run, its test."""
    return support.options_of(read_json(support.RESULTS / "cpu" / "tests.json"))


def test_the_test_of_every_option_that_passed_on_cpus_exists(options_on_cpus):
    tests = [option["test"] for option in options_on_cpus.values() if option["outcome"] == "passed"]
    assert tests
    assert [test for test in tests if not (REPOSITORY / test).exists()] == []


def test_the_cpus_record_says_of_every_option_that_a_run_may_have_whether_it_ran(options_on_cpus):
    options = set(support.OPTIONS)
    for name_by_value in support.NAMED.values():
        options.update(name_by_value.values())
    assert options - options_on_cpus.keys() == set()


def test_a_cards_file_is_all_that_the_tables_need(card, tables):
    """Parts that failed or were ended are listed as such, the goals have figures, and README names the card."""
    table = tables.device_table()
    rows = [line for line in table.splitlines() if "Made-up" in line and line.startswith("|")]
    outcomes = {
        "losses": "passed",
        "update": "passed",
        "tests on 1": "failed: test_updates.py::test_fused_kernels",
        "rollout": "passed",
        "train": "timed out after 1500 s",
    }
    expected_rows = []
    for part, outcome in outcomes.items():
        expected_rows.append(f"| Made-up GPU 80GB | {part} | {outcome} | 00000000 | 2026-01-02 |")
    assert rows == expected_rows
    ran = "**Run by tests on Made-up GPU 80GB:**\n\n| option | note |\n|---|---|\n| SGLang |  |\n| vLLM |  |\n"
    assert ran in table
    assert "SGLang" not in table.split("**Run by no test:**")[1]
    assert tables.device_names()["README.md"] == "CPUs, Made-up GPU 80GB"
    assert tables.device_names()["README.zh.md"] == "CPU、Made-up GPU 80GB"
    goals = [line.split(" | ")[-1].strip("| ") for line in tables.measured_goals().splitlines() if "---" not in line]
    figures = ["1.75", "0.07", "0.5, **missed**", "0", "1.15", "failed", "1, **missed**", "not run"]
    assert goals == ["Made-up GPU 80GB", *figures]


SHORT = ("data.max_prompt_length=64", "data.max_response_length=24")


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (SHORT, "1 node, 1 rank, fsdp2, vllm, 88 tokens, cuda: tried on Made-up GPU 80GB"),
        ((*SHORT, "trainer.nnodes=8"), "8 nodes, 8 ranks, fsdp2, vllm, 88 tokens, cuda: not tried"),
        ((*SHORT, f"{STRATEGY}=fsdp"), "1 node, 1 rank, fsdp, vllm, 88 tokens, cuda: not tried"),
        ((), "1 node, 1 rank, fsdp2, vllm, 1,024 tokens, cuda: not tried"),
        (("+hardware=cpu", *SHORT), "1 node, 1 rank, fsdp2, cpu, 88 tokens, cpu: tried on CPUs"),
    ],
)
def test_explain_says_where_such_a_run_has_run(card, tmp_path, monkeypatch, overrides, where):
    hardware = ("+hardware=gpu",)
    if "+hardware=cpu" in overrides:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
        hardware = ()
    answer = explained(tmp_path, *NEEDED, *hardware, "+clipx=acpo", *overrides)
    assert answer["stops"] == []
    assert f"  has run on: CPUs, Made-up GPU 80GB; this run: {where}" in answer["text"]


def test_an_option_that_passed_on_a_card_is_tested_and_one_that_failed_on_all_is_not(card):
    values = {**dict.fromkeys(READ), STRATEGY: "fsdp2", ROLLOUT_NAME: "sglang", ESTIMATOR: "grpo"}
    assert untested(values) == []
    card["parts"]["tests on 2"] = {"options": {"SGLang": {"outcome": "failed"}}, "outcome": "failed"}
    write_json(support.RESULTS / "gpu" / MADE_UP_CARD.name, card)
    support.read_records.cache_clear()
    assert untested(values) == [f"{ROLLOUT_NAME}=sglang"]


def test_the_cpus_runs_are_those_of_the_end_to_end_tests(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    task = SimpleNamespace(train="t", test="t", policy="p")
    overrides = [word for word in common_overrides(task, Path("r"), 1) if "path" not in word and "files" not in word]
    shape = support.shape_of(composition(*overrides, "trainer.n_gpus_per_node=2"))
    assert shape in support.read_records(support.RESULTS)[0]["parts"]["tests"]["runs"]


def wrong_entries(record):
    """What keeps a file out of docs/results/gpu: it says which card ran what, with what, at a commit that exists."""
    forms = {"uuid": r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "driver": r"\d+(\.\d+)+", "cuda": r"\d+\.\d+"}
    wrong = [key for key, form in forms.items() if not re.fullmatch(form, str(record.get(key)))]
    if record["rehearsal"] is not False:
        wrong.append("rehearsal")
    if record["kind"] != "cuda":
        wrong.append("kind")
    for name, part in record["parts"].items():
        command = ["git", "cat-file", "-e", f"{part['commit']}^{{commit}}"]
        exists = IS_SHALLOW or subprocess.run(command, cwd=REPOSITORY, capture_output=True).returncode == 0
        if part["changed"] or not exists:
            wrong.append(name)
    return wrong


def git(*words):
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


# A clone without history cannot say which commits exist.
IS_SHALLOW = git("rev-parse", "--is-shallow-repository") != "false"


def test_a_file_of_a_card_says_which_with_what_and_at_which_commit():
    for path in (support.RESULTS / "gpu").glob("*.json"):
        assert wrong_entries(read_json(path)) == [], path
    record = read_json(MADE_UP_CARD)
    assert IS_SHALLOW or wrong_entries(record) == [*record["parts"]]
    for part in record["parts"].values():
        part["commit"] = git("rev-parse", "HEAD") or part["commit"]
    assert wrong_entries(record) == []
    record["parts"]["update"]["changed"] = True
    assert wrong_entries(record) == ["update"]
    all_wrong = {"parts": {}, "uuid": None, "driver": "580", "cuda": None, "rehearsal": True, "kind": "cpu"}
    assert wrong_entries(record | all_wrong) == ["uuid", "driver", "cuda", "rehearsal", "kind"]


@pytest.fixture
def model():
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, attn_implementation="sdpa"))


def test_a_models_attention_is_looked_at_in_the_worker(model):
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=1))
    for module in (model, [model]):
        with pytest.raises(RuntimeError, match=r"2 ranks share a sequence .*attention is sdpa.*flash_attention_2"):
            refuse_attention_on_a_slice(SimpleNamespace(module=module, ulysses_sequence_parallel_size=2))
    model.config._attn_implementation = "flash_attention_2"
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=2))


def test_fsdp_turbos_attention_is_its_own(model):
    """verl's engine without its package: how it takes up its own parallelism."""
    engine = object.__new__(FSDPTurboEngineWithLMHead)
    engine.module = model
    engine.engine_config = SimpleNamespace(strategy="fsdp_turbo")
    engine.model_config = SimpleNamespace(hf_config=model.config)
    engine.ulysses_sequence_parallel_size = 1
    engine._parallel_state = SimpleNamespace(get_ulysses_group_size=lambda: 2, get_ulysses_group=lambda: None)
    engine._process_ulysses_config()
    assert model.config._attn_implementation == "eager" and engine.ulysses_sequence_parallel_size == 2
    refuse_attention_on_a_slice(engine)
    engine.engine_config.strategy = "fsdp2"
    with pytest.raises(RuntimeError, match="attention is eager"):
        refuse_attention_on_a_slice(engine)


@pytest.mark.parametrize(
    ("ranks_with_outputs", "dp_ranks", "writer"),
    [
        # Two stages of a pipeline with two data-parallel ranks each: the last stage has the tokens.
        ((False, False, True, True), (0, 1, 0, 1), 2),
        # FSDP with two ranks for each sequence.
        ((True, False, True, False), (0, 0, 1, 1), 0),
        ((True,), (0,), 0),
    ],
)
def test_a_rank_with_tokens_writes_the_state(monkeypatch, ranks_with_outputs, dp_ranks, writer):
    reduced = []
    returned = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: reduced.append(int(tensor)))
    for rank, (has_outputs, dp_rank) in enumerate(zip(ranks_with_outputs, dp_ranks, strict=True)):
        engine = SimpleNamespace(
            is_mp_src_rank_with_outputs=lambda has_outputs=has_outputs: has_outputs,
            get_data_parallel_rank=lambda dp_rank=dp_rank: dp_rank,
        )
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        returned.append(state_rank(engine, "cpu"))
    # Each rank offers itself or a negative number; the largest writes.
    assert returned == reduced
    assert max(reduced) == writer
    assert sum(rank >= 0 for rank in reduced) == 1


def test_the_costs_that_explain_names_are_those_of_the_page():
    costs = support.read_costs()
    page = " ".join((REPOSITORY / "docs/dev/measurements.md").read_text("utf-8").split())
    factors = costs["update_of_vanilla"]
    assert f"| ACPO, `mini_batch` | {factors['mini_batch']}," in page
    assert f"| ACPO, `lagged` | {factors['lagged']}," in page
    assert f"twice as many steps | {factors['lopti']:.3f} |" in page
    readme = " ".join((REPOSITORY / "README.md").read_text("utf-8").split())
    shares = [float(share) - 1 for share in re.findall(r"\| \w+, `mini_batch` \| ([\d.]+),", page)]
    assert len(shares) == 2
    assert f"update took {100 * min(shares):.0f} to {100 * max(shares):.0f} % longer" in readme
    assert f"it took {100 * (factors['lagged'] - 1):.0f} % longer" in readme
    users_page, _, section = costs["source"].partition("#")
    assert section == "cost"
    cost_section = " ".join((REPOSITORY / users_page).read_text("utf-8").partition("## Cost\n")[2].split())
    acpo, bapo = (f"{100 * share:.0f} %" for share in sorted(shares, reverse=True))
    assert f"Measured: {acpo} of an update's time with ACPO, {bapo} with BAPO" in cost_section
    assert f"measured: {100 * (factors['lagged'] - 1):.0f} % of an update's time with ACPO" in cost_section
    # A quarter of 64 x 4,096 tokens.
    megabytes = re.search(r"with 25 % of the prompts traced [^;]*; ([\d.]+) MB a rollout batch", page)
    assert 64 * 4096 / 4 * costs["trace_bytes_a_token"] / 1e6 == pytest.approx(float(megabytes[1]), rel=0.01)
