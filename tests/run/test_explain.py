"""What verl's driver answers under CLIPX_EXPLAIN: what a run would train, cost and keep, or why it would stop. Not
covered: the command around it, stand-ins and sessions (test_explain_command.py), the line's parts
(test_description.py), each refusal (test_verl_keys.py), each rule of divisibility (test_divisibility.py).
"""

import itertools
import os
import re
import socket
import sys

import huggingface_hub.constants
import pytest

from tests.hydra_main import ENTRIES, MAIN_PPO, NEEDED, SFT, explained
from tests.messages import assert_names
from verl_clipx.losses.methods import METHODS
from verl_clipx.losses.modifiers.pull import Pull, pulled
from verl_clipx.run.description import describe_bounds

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def explain(tmp_path):
    """The answer to a command line of verl's main (or of `module`), to which the keys that verl needs are added."""

    def run(*words, module=MAIN_PPO):
        # Hydra takes its options only before all overrides.
        options = list(itertools.takewhile(lambda word: word.startswith("-") or "=" not in word, words))
        needed = NEEDED if module == MAIN_PPO else ()
        return explained(tmp_path, *options, *needed, *words[len(options) :], module=module)

    return run


@pytest.mark.parametrize(
    ("overrides", "loss", "settings"),
    [
        (
            ["+clipx=acpo"],
            "clipx_acpo (+clipx=acpo), scope mini_batch",
            "alpha 3, epsilon_base .*, 5 bins: the paper's",
        ),
        (
            ["+clipx=acpo", "clipx.alpha=2", "clipx.scope=lagged", "clipx.compile=false", "clipx.receipt=off"],
            "clipx_acpo (+clipx=acpo), scope lagged",
            "alpha 2, epsilon_base 0.2, 5 bins: the paper's but for alpha=2 (group: 3), scope=lagged "
            "(group: mini_batch)",
        ),
        (["+clipx=dgpo_reference"], "clipx_dgpo (+clipx=dgpo_reference)", ".*: the released code's"),
        (["+clipx=observe"], "vanilla, verl's own loss, observed (+clipx=observe)", "None"),
        ([], "vanilla, verl's own loss; the plugin has no part in this run", "None"),
    ],
)
def test_it_says_what_is_trained_and_whose_settings_these_are(explain, overrides, loss, settings):
    answer = explain(*overrides)
    assert answer["stops"] == []
    assert answer["loss"].partition(": ")[0] == loss
    assert re.fullmatch(re.escape(settings).replace(r"\.\*", ".*"), str(answer["settings"]))
    assert answer["text"][0] == answer["loss"] and answer["text"][-1] == "Nothing in the configuration stops it."
    assert answer["of_the_plugin"] == bool(overrides)


@pytest.mark.slow
def test_it_says_what_is_taken_over_what_is_left_to_verl_and_what_the_loss_costs(explain):
    temperatures = (f"+{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_neg=2")
    other_terms = (f"{ACTOR}.entropy_coeff=0.01", f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True")
    micro_batch = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
    correction = "algorithm.rollout_correction.rollout_is=token"
    answer = explain("+clipx=sapo", *temperatures, *other_terms, micro_batch, correction)
    assert answer["stops"] == [] and answer["line"].startswith("clipx: clipx_sapo (")
    assert answer["taken"] == {"tau_negative": "tau_neg=2", "tau_positive": "policy_loss.tau_pos=1.5"}
    terms = answer["of_verl"]
    assert terms[:3] == ["entropy bonus 0.01", "KL loss low_var_kl 0.001", "KL penalty in the rewards 0.001"]
    assert terms[3].startswith("rollout correction rollout_is=token")
    for overrides, cost in (
        (["+clipx=acpo", "clipx.scope=lagged"], "no extra pass"),
        (["+clipx=acpo", f"{ACTOR}.ppo_mini_batch_size=1024"], "no extra pass"),
        (["+clipx=bapo", "+clipx/update=lopti"], "one extra forward pass before each update and a second pass of each"),
    ):
        assert explain(*overrides)["cost"].startswith(cost)


BATCH = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=8")


@pytest.mark.slow
def test_it_says_what_a_cluster_would_ask(explain):
    sglang = "actor_rollout_ref.rollout.name=sglang"
    trace = ("+clipx/trace=prompts", "clipx.trace.fraction=0.25")
    answer = explain("+clipx=acpo", *BATCH, *trace, "data.max_response_length=1000", sglang)
    assert answer["tested"] == {sglang: ["vllm", "cpu"]}
    assert f"  no test has run: {sglang} (tests have run vllm and cpu)" in answer["text"]
    assert "of an update's time: 33 % for the extra pass (docs/scopes.md#cost)" in answer["cost"]
    assert answer["risk"].startswith("where σ reaches 0.267, the lower bound is 0 and nothing is clipped below")
    # 64 prompts x 8 responses x 1,000 tokens, a quarter of them, 35 bytes each.
    assert answer["traces"].startswith("25 % of the prompts, in one of 10 rollout batches; at most about 4.5 MB each")
    assert "resumes its checkpoints under verl's own loss" in answer["way_back"] and answer["mask"] is None
    lopti = explain("+clipx=acpo", "+clipx/update=lopti", *BATCH)["cost"]
    assert "33 % for the extra pass, 100 % for Lopti" in lopti
    assert "2 % for clipx.scope=lagged" in explain("+clipx=acpo", "clipx.scope=lagged", *BATCH)["cost"]
    assert "%" not in explain("+clipx=grpo", *BATCH)["cost"]


@pytest.mark.slow
def test_a_resumed_run_keeps_the_learning_rate_of_its_checkpoint(explain, tmp_path):
    checkpoint = tmp_path / "saved/global_step_12"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("12")
    folder_of_run = f"trainer.default_local_dir={checkpoint.parent}"
    named_checkpoint = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    weights_alone = f"{ACTOR}.checkpoint.load_contents=[model]"
    for overrides, is_kept in (
        ((folder_of_run,), True),
        (named_checkpoint, True),
        ((), False),
        ((folder_of_run, weights_alone), False),
    ):
        answer = explain("+clipx=acpo", f"{ACTOR}.optim.lr=1e-5", *overrides)
        assert (answer["resumes"] or "").startswith("the checkpoint of step 12, whose learning rate") == is_kept
        assert any(f"whatever {ACTOR}.optim.lr says" in line for line in answer["text"]) == is_kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sigma"),
    [
        (["+clipx=acpo", "clipx.alpha=2"], "0.400"),
        (["+clipx=acpo_reference"], "0.267"),
        (["+clipx=acpo", "clipx.epsilon_max=0.9"], None),
        (["+clipx=acpo", f"{ACTOR}.ppo_mini_batch_size=64"], None),
        (["+clipx=acpo", f"{ACTOR}.ppo_mini_batch_size=64", "+clipx/update=lopti"], "0.267"),
        (["+clipx=bapo"], None),
    ],
)
def test_where_acpo_comes_to_clip_nothing_below_it_says_so(explain, overrides, sigma):
    risk = explain(*BATCH, *overrides)["risk"]
    assert risk is None if sigma is None else risk.startswith(f"where σ reaches {sigma},")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["+clipx/mask=icepop"],
            "icepop (low 0.5, high 5) takes out tokens whose ratio of the old policy's to the sampler's probability",
        ),
        (["+clipx/mask=opsm", "clipx.mask.delta=0.5"], "opsm (delta 0.5) takes out sequences with negative advantages"),
    ],
)
def test_it_says_what_a_mask_takes_out_and_by_which_ratio(explain, overrides, says):
    mask = explain("+clipx=grpo", *overrides, "actor_rollout_ref.rollout.calculate_log_probs=True")["mask"]
    policy = "policy of old_log_probs" if "icepop" in says else "current policy"
    assert mask.startswith(says) and f"it compares the {policy} with the one that sampled" in mask
    assert mask.endswith("by the ratio to the policy of old_log_probs")


@pytest.mark.slow
def test_it_says_where_the_runs_files_go_and_what_the_receipt_does(explain, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    log = {"log": str(tmp_path / "metrics.jsonl"), "record": str(tmp_path / "metrics.run.json")}
    answer = explain("+clipx=acpo", "trainer.logger=[file]", "+clipx/trace=prompts", f"{ACTOR}.strategy=fsdp2")
    assert answer["files"] == {**log, "traces": str(tmp_path / "traces")}
    answer = explain("+clipx=acpo", "trainer.logger=[file]", "clipx.log=false", "clipx.receipt=off")
    assert answer["files"] == {"verl's log": str(tmp_path / "metrics.jsonl")}
    assert answer["receipt"].startswith("off")
    assert explain("+clipx=acpo", "clipx.receipt=stop")["receipt"].startswith("stops the run")
    assert explain("+clipx=acpo", "clipx.receipt=warn")["receipt"].startswith("warns")
    # Nothing is written: no log, no lock, no output folder of Hydra's.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        (["trainer.nnodes=0"], "trainer.nnodes=0: 0 was counted here"),
        (["trainer.n_gpus_per_node=0"], "trainer.n_gpus_per_node=0: 0 was counted here"),
        (["trainer.n_gpus_per_node=0", "trainer.nnodes=''"], "trainer.nnodes='' and trainer.n_gpus_per_node=0: 0 was"),
    ],
)
@pytest.mark.parametrize("group", [[], ["+clipx=acpo"]])
def test_nodes_or_gpus_that_a_script_could_not_count_stop_nothing(explain, group, overrides, row):
    answer = explain(*group, *overrides)
    assert answer["stops"] == [] and answer["uncounted"].startswith(row)
    assert any(line.startswith(f"  machines: {row}") for line in answer["text"])
    # What has no count in it is still checked.
    (reason,) = explain(*group, *overrides, "data.train_batch_size=128")["stops"]
    assert reason.startswith("verl refuses it: train_batch_size (128) must be >= actor.ppo_")


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.slow
@pytest.mark.parametrize("group", [[], ["+clipx=observe"], ["+clipx=acpo"]])
@pytest.mark.parametrize(
    ("key", "says"),
    [
        (f"{ROLLOUT}.name", f"no {ROLLOUT}.name"),
        (f"{ACTOR}.strategy", f"no {ACTOR}.strategy"),
        ("trainer.device", "no trainer.device"),
        (f"{ACTOR}.kl_loss_type", "KL loss null 0.001"),
        (f"{ACTOR}.kl_loss_coef", "KL loss low_var_kl null"),
        ("algorithm.kl_ctrl.kl_coef", "KL penalty in the rewards null"),
        *(
            (key, f"stops: {key}=null: must be a whole number above 0.")
            for key in (
                *("trainer.nnodes", "trainer.n_gpus_per_node", "data.train_batch_size", f"{ROLLOUT}.n"),
                *(f"{ACTOR}.ppo_mini_batch_size", "data.max_prompt_length", "data.max_response_length"),
            )
        ),
    ],
)
def test_a_key_without_a_value_is_never_called_none(explain, group, key, says):
    terms = (f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True", f"{ROLLOUT}.name=vllm")
    micro_batch = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
    answer = explain(*group, *terms, micro_batch, f"++{key}=null")
    assert not any("None" in line for line in answer["text"])
    if group or not says.startswith("no "):
        assert any(says in line for line in answer["text"]), answer["text"]


# The node in which the plugin keeps its facts about the run.
FACTS = f"{ACTOR}.policy_loss.run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "begin"),
    [
        (["+clipx=grpo", "clipx.clip_hihg=1"], "clipx.clip_hihg"),
        # A method that cannot hold a target is named before a value is asked for.
        (["+clipx=acpo", "+clipx/hold=clip_fraction"], "clipx.hold: acpo cannot hold a target"),
        (["+clipx=sapo", "+clipx/hold=second_moment"], "clipx.hold: sapo cannot hold a target"),
        (["+clipx=dapo", f"{ACTOR}.clip_ratio_high=0.2"], f"{ACTOR}.clip_ratio_high=0.2"),
        # A fact about the run, which its line and its loss depend on.
        (["+clipx=acpo", f"+{FACTS}.epochs=1"], FACTS),
        # What verl's own check says of the same run, and verl's dataclasses of a key that they lack.
        (["+clipx=grpo", "data.train_batch_size=128"], "verl refuses it: train_batch_size (128) must be >= actor.ppo_"),
        (
            [f"+{ACTOR}.clip_ratoi=0.2"],
            "verl refuses it: Error in call to target 'verl.workers.config.actor.",
        ),
        # What Hydra says of keys that verl does not have, and of a group without its +.
        (["algorithm.adv_estimater=grpo"], "Could not override 'algorithm.adv_estimater'."),
        (
            ["clipx=acpo"],
            "Could not override 'clipx'. No match in the defaults list.\nTo append to your default list",
        ),
        (["+clipx=acpo", f"{ACTOR}.policy_loss.loss_mode=gspo"], f"{ACTOR}.policy_loss.loss_mode=gspo: contradicts"),
        (["+clipx=acpo", "a.b=+clipx=acpo"], "a.b=+clipx=acpo is not an override that Hydra can read: mismatched"),
        (["a.b={c:"], "a.b={c: is not an override that Hydra can read: "),
        (["a=choice()"], "a=choice() is not an override that Hydra can read: ValueError while evaluating 'choice()'"),
        (
            ["+clipx=acpo", " "],
            "There is a blank where an override should be. A blank after a backslash ends the command",
        ),
        # A rule of divisibility.
        (["data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=300"], f"{ACTOR}.ppo_mini_batch_size=300"),
        (["+clipx=nonsense"], "In 'ppo_trainer': Could not find 'clipx/nonsense'"),
        (
            ["+clipx=grpo", "+clipx/hold=other"],
            "In 'ppo_trainer': Could not find 'clipx/hold/other'\nAvailable options in 'clipx/hold': clip_frac",
        ),
        (["+clipx=acp0"], "+clipx=acp0: there is no such group. Did you mean +clipx=acpo"),
        (["+hardware=cpuu"], "+hardware=cpuu: there is no such group. Did you mean +hardware=cpu?"),
        (["+clipx/select=high_entrop"], "+clipx/select=high_entrop: there is no such group. Did you mean "),
    ],
)
def test_it_stops_where_the_run_would(explain, overrides, begin):
    answer = explain(*overrides)
    assert any(message.startswith(begin) for message in answer["stops"]), answer["stops"]
    assert answer["text"][-len(answer["stops"]) :] == [f"stops: {reason}" for reason in answer["stops"]]
    assert not any("Traceback" in message for message in answer["stops"])
    assert ("Remove loss_mode" in answer["stops"][0]) == ("contradicts clipx.method" in answer["stops"][0])


@pytest.mark.parametrize(
    ("content", "begin"),
    [
        # What the plugin keeps in verl's node: refused, or never read.
        (f"{ACTOR}: {{policy_loss: {{clipx: {{alpha: 2}}}}}}", f"{ACTOR}.policy_loss.clipx: the plugin fills it"),
        (f"{ACTOR}: {{policy_loss: {{run: {{group: dapo}}}}}}", None),
        ("clipx: {run: 1}", "clipx.run=1: is not a parameter"),
        # As in a configuration that Hydra has recorded.
        (f"{ACTOR}: {{policy_loss: {{run: '${{clipx_run:}}'}}}}", None),
    ],
)
def test_a_file_of_the_users_own_is_refused_for_what_a_command_line_would_be(explain, tmp_path, content, begin):
    (tmp_path / "mine").mkdir()
    node, _, values = content.partition(": ")
    (tmp_path / "mine" / "own.yaml").write_text(f"# @package {node}\n{values[1:-1]}\n")
    answer = explain("--config-dir", str(tmp_path), "+clipx=acpo", "+mine=own")
    if begin is None:
        assert answer["stops"] == [] and "+clipx=acpo" in answer["line"]
    else:
        (reason,) = answer["stops"]
        assert reason.startswith(begin)


@pytest.mark.slow
def test_a_group_of_the_users_own_has_its_name(explain, tmp_path):
    (tmp_path / "clipx").mkdir()
    (tmp_path / "clipx" / "bapo2.yaml").write_text("# @package _global_\ndefaults: [bapo]\nclipx: {target: 0.61}\n")
    answer = explain(f"--config-dir={tmp_path}", "+clipx=bapo2")
    assert "(+clipx=bapo2), scope mini_batch" in answer["loss"] and answer["settings"].startswith("target 0.61")


@pytest.mark.slow
def test_neither_the_hub_nor_vllm_is_asked(explain, monkeypatch):
    # With a network and without one, the answer is the same.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    for module in [name for name in sys.modules if name.startswith("verl.workers.rollout.vllm_rollout")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "vllm", None)
    models = ["actor_rollout_ref.model.path=some/model", "critic.model.path=some/critic"]
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=vllm"]
    critic = ["algorithm.adv_estimator=gae", *models, "+clipx=acpo"]
    answer = explain(*critic, "critic.ppo_micro_batch_size_per_gpu=4", *lora)
    assert (answer["stops"], answer["loss_mode"]) == ([], "clipx_acpo")
    # What verl's check says of the rest of the critic stands.
    (reason,) = explain(*critic)["stops"]
    assert "[critic] Please set at least one of 'critic.micro_batch_size'" in reason


def test_the_other_entries_and_supervised_training(explain):
    one_step, fully_async = list(ENTRIES)[1:]
    answer = explain("+clipx=bapo", "async_training.require_batches=2", module=fully_async)
    assert (answer["loss_mode"], answer["stops"]) == ("clipx_bapo", [])
    assert answer["updates"].startswith("2 updates") and "bypass_mode" in answer["ratio"]
    search_path = "hydra.searchpath=[pkg://verl.trainer.config]"
    assert explain(search_path, *NEEDED, "+clipx=dgpo", module=one_step)["loss_mode"] == "clipx_dgpo"
    (supervised,) = SFT
    answer = explain(module=supervised)
    assert answer["loss"].startswith("no policy loss") and answer["stops"] == []
    (reason,) = explain("+clipx=acpo", module=supervised)["stops"]
    assert reason.startswith("+clipx=acpo: nothing reads it")


def test_a_sweep_is_answered_for_its_first_run_and_writes_nothing(explain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    answer = explain("--multirun", "+clipx=acpo", "clipx.alpha=2,3")
    assert "alpha 2" in answer["settings"] and answer["arguments"] is None
    assert answer["text"][0].startswith("only the first run of a sweep is explained: clipx_acpo")
    assert not [name for name in os.listdir(tmp_path) if name in ("multirun", "outputs")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("clip_ratio_c", "ratio 0.8 to 1.2; clip_ratio_c null, at which verl stops"),
        ("clip_ratio_low", "ratio 0.8 to 1.2; clip_ratio_c 3"),
        ("clip_ratio_high", "ratio 0.8 to 1.2; clip_ratio_c 3"),
    ],
)
def test_bounds_of_verls_own_loss_where_one_is_null(explain, key, bounds):
    assert explain(f"{ACTOR}.{key}=null")["bounds"] == bounds


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ({"clip_ratio_low": "high"}, "none: verl stops at clip_ratio_low=high, which is no number"),
        ({"clip_ratio": "null", "clip_ratio_high": "null"}, "none: verl stops at clip_ratio=null, which is no number"),
        ({"clip_ratio_c": "high"}, "ratio 0.8 to 1.2; clip_ratio_c high, at which verl stops"),
    ],
)
def test_a_width_of_verls_own_loss_that_is_no_number_is_named(explain, keys, bounds):
    words = [f"{ACTOR}.{name}={value}" for name, value in keys.items()]
    assert explain(*words)["bounds"] == bounds


@pytest.mark.parametrize("group", [(), ("+clipx=grpo",), ("+clipx=observe",)])
def test_a_context_that_does_not_hold_prompt_and_response_is_named(explain, group):
    lengths = ("data.max_prompt_length=4", "data.max_response_length=6")
    answer = explain(*group, *lengths, "actor_rollout_ref.rollout.max_model_len=8")
    assert answer["cut"].startswith("cut by actor_rollout_ref.rollout.max_model_len=8: beside a prompt of 4 tokens")
    assert answer["cut"].endswith("there is room for 4, and a response may have 6")
    assert any("responses: cut by" in line for line in answer["text"])
    for length, name, is_cut in (
        (10, "vllm", False),
        (10, "sglang", True),
        (11, "sglang", False),
        ("null", "vllm", False),
    ):
        rollout = (f"actor_rollout_ref.rollout.max_model_len={length}", f"actor_rollout_ref.rollout.name={name}")
        assert (explain(*group, *lengths, *rollout)["cut"] is not None) == is_cut


def test_of_sglangs_context_the_token_that_it_keeps_free_is_named(explain):
    lengths = ("data.max_prompt_length=4", "data.max_response_length=6")
    rollout = ("actor_rollout_ref.rollout.max_model_len=10", "actor_rollout_ref.rollout.name=sglang")
    cut = explain("+clipx=grpo", *lengths, *rollout)["cut"]
    assert "max_model_len=10, of which SGLang keeps a token free" in cut
    assert "there is room for 5, and a response may have 6" in cut


@pytest.mark.parametrize("key", ["data.max_prompt_length", "data.max_response_length"])
@pytest.mark.parametrize("value", ["null", "1k"])
def test_a_length_that_is_no_number_stops_the_run_whose_context_would_be_compared_with_it(explain, key, value):
    context = "actor_rollout_ref.rollout.max_model_len=1024"
    traced = ("+clipx/trace=prompts", "algorithm.rollout_correction.rollout_is=sequence")
    answer = explain("+clipx=grpo", *traced, f"{key}={value}", context)
    assert any(f"{key}=" in stop for stop in answer["stops"]) and answer["cut"] is None


@pytest.mark.parametrize(
    ("method", "values", "expected"),
    [
        ("grpo", dict(clip_low=None, clip_high=1.28), "ratio up to 1.28; dual_clip 3"),
        ("cispo", dict(clip_low=0, clip_high=None, mask_high=1.3), "ratio without bounds; mask_high 1.3"),
        ("dppo", dict(threshold_low=None), "divergence (tv) of the token's probability -∞ to 0.2; weight_high 5"),
        (
            "acpo",
            dict(epsilon_max=3, dual_clip=3),
            "ratio 1 - epsilon to 1 + epsilon, epsilon = 3 σ + 0.2, σ of the ratio in each of 5 bins of the old "
            "probability; dual_clip 3; epsilon_max 3",
        ),
        ("kpop", {}, "larger divergence of the token's probability up to 0.1; penalty: kl_tau 0.001"),
        (
            "grpo",
            dict(pull={"estimator": "k3", "coefficient": 0.01}),
            "ratio 0.8 to 1.2; penalty: pull k3 to old, times 0.01; dual_clip 3",
        ),
        ("m2po", {}, "log-ratio -tau to tau, the largest tau with a second moment of at most 0.04"),
        (
            "bapo",
            dict(target=0.45),
            "ratio c_low to c_high, c_low from 0.6 to 0.9 by 0.02, c_high from 1.2 to 3 by 0.05, upper first, until "
            "contribution=share is at least 0.45",
        ),
        (
            "cppo",
            dict(threshold=0.2),
            "change of the token's probability -c / w to c / w, c at most 0.2, less what the tokens before have used, "
            "w from 1 at the first token to 0.8 at the last",
        ),
        ("ctpo", {}, "prefix's ratio exp(-0.025 t^0.5) to exp(0.05 t^0.5), t the token's position; width_dual 0.05"),
        (
            "dcpo",
            dict(largest_ratio=None),
            "ratio (1 + √(1 - 4 · 0.16 / q)) / 2 to (1 + √(1 + 4 · 0.2 / q)) / 2, q the token's old probability, the "
            "root of a negative number taken to be 0; dual_clip 10",
        ),
        (
            "p3o",
            {},
            "ratio up to E, E the effective sample size of the mini-batch's ratios, at most 1, with a pull back",
        ),
    ],
)
def test_the_bounds_in_words(method, values, expected):
    pull = values.pop("pull", None)
    method = METHODS[method](**values)
    assert describe_bounds(method if pull is None else pulled(method, Pull(**pull))) == expected


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_its_bounds_without_english(name):
    formula = " ".join(METHODS[name].formula)
    assert {*re.findall(r"(?<!{)\b[A-Za-z]{2,}\b", formula)} <= {"epsilon", "exp", "tau"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["+clipx=acpo"],
            "verl takes +clipx=acpo for a new key, reads it nowhere, and trains its own loss; add clipx.",
        ),
        (["+clipx=observe", "+clipx/trace=prompts"], "verl takes +clipx=observe for a new key"),
        (["+clipx=acpo", "clipx.scope=mini_batch"], "verl stops at clipx.scope, before Ray starts"),
        (["+clipx=grpo", "clipx.clip_low=0.5"], "verl stops at clipx.clip_low, before Ray starts"),
        ([], "None"),
    ],
)
def test_it_says_what_a_verl_without_the_plugin_does_with_the_same_command(explain, overrides, says):
    answer = explain(*overrides)
    assert answer["stops"] == [] and str(answer["without_plugin"]).startswith(says)
    # The last row before the verdict.
    assert answer["text"][-2].startswith("  without the plugin: ") == bool(overrides)


CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
REFERENCE = (f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True")
LOG_PROBS_OF_ROLLOUT = (
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "algorithm.rollout_correction.rollout_is_threshold=2",
)


def test_weights_by_sequence_are_said_to_vanish_in_long_responses(explain):
    key = "algorithm.rollout_correction.rollout_is"
    overrides = ("+clipx=acpo", *BATCH, *LOG_PROBS_OF_ROLLOUT, "data.max_response_length=20480")
    answer = explain(*overrides, f"{key}=sequence")
    # 0.06 is exp(-20480 x 0.000137).
    assert "in one of 20,480 tokens, a log-ratio that is 0.00014 below 0" in answer["sequence_weights"]
    assert any(line.startswith("  weights: ") for line in answer["text"])
    assert explain(*overrides, f"{key}=token")["sequence_weights"] is None


@pytest.mark.parametrize(
    ("overrides", "share", "share_of_step", "size"),
    [
        # An update is three forward passes, or four; old_log_probs are one more, and so is the reference.
        pytest.param(
            ["+clipx=acpo", f"{CHECKPOINTING}=False"],
            "a third of an update",
            "25 %",
            "128 bytes",
            id="without gradient checkpointing",
        ),
        pytest.param(
            ["+clipx=acpo", f"{CHECKPOINTING}=True"],
            "a quarter of an update (with gradient",
            "20 %",
            "128 bytes",
            id="with gradient checkpointing",
        ),
        pytest.param(
            ["+clipx=acpo", f"{CHECKPOINTING}=True", *REFERENCE],
            "a quarter of an update",
            "17 %",
            "128 bytes",
            id="with a reference model",
        ),
        pytest.param(
            ["+clipx=acpo", f"{CHECKPOINTING}=True", f"{ACTOR}.ppo_epochs=4"],
            "a quarter",
            "24 %",
            "128 bytes",
            id="with four epochs",
        ),
        pytest.param(
            ["+clipx=acpo", f"{CHECKPOINTING}=True", "clipx.bins=10"],
            "a quarter",
            "20 %",
            "248 bytes",
            id="with ten bins",
        ),
    ],
)
def test_the_extra_pass_has_its_cost_by_formula(explain, overrides, share, share_of_step, size):
    cost = explain(*BATCH, *overrides)["extra_pass"]
    assert_names(cost, share, f"and {share_of_step} of a step's other passes", f"{size} are all-reduced")
    assert "no activations are kept" in cost


@pytest.mark.parametrize("overrides", [["+clipx=grpo"], ["+clipx=acpo", "clipx.scope=lagged"], ["+clipx=observe"]])
def test_without_an_extra_pass_it_has_no_cost(explain, overrides):
    assert explain(*BATCH, *overrides)["extra_pass"] is None
