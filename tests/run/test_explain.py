"""`clipx explain`: what a verl command would train, or why it would stop, without running it.

Covers: by the command line: the line of the run, its bounds, what is taken over, exit codes and messages; every form of
a command.
Not covered: that the run prints the same line (tests/run/test_start.py), the line's parts
(tests/run/test_announcement.py).
"""

import inspect
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.methods import METHODS
from verl_clipx.run.explain import ENTRIES, of_method

ACTOR = "actor_rollout_ref.actor"
NEEDED = (
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)
HIGH = f"{ACTOR}.clip_ratio_high=0.28"


def explain(*words):
    result = CliRunner().invoke(app, ["explain", "--", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        (),
        ("python3", "-m", "verl.trainer.main_ppo"),
        ("ray", "job", "submit", "--", "python", "-m", "verl.trainer.main_ppo"),
    ],
)
def test_it_prints_the_runs_line_and_what_is_taken_over(before):
    code, output = explain(*before, *NEEDED, "+clipx=grpo", HIGH)
    line, bounds, taken = output.splitlines()
    assert code == 0
    assert line.startswith("clipx: clipx_grpo (+clipx=grpo), fixed bounds, clip_high=1.28 (group: 1.2; from ")
    assert line.endswith("4 updates per rollout batch: clipping can act")
    assert bounds == "bounds at the start: ratio 0.8 to 1.28; dual_clip 3"
    assert taken == f"taken over: {HIGH} as clipx.clip_high=1.28"


CORRECTION = "algorithm.rollout_correction"
NO_LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=False"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        # verl's own registries and checks say what is allowed.
        (
            ["+clipx=observe", f"{ACTOR}.policy_loss.loss_mode=vanila"],
            f"{ACTOR}.policy_loss.loss_mode=vanila with +clipx=observe: verl has no such loss to observe.",
        ),
        (
            ["+clipx=grpo", "trainer.v1.trainer_mode=asynchronous"],
            "trainer.v1.trainer_mode=asynchronous with trainer.use_v1=True: verl has no such trainer. Set "
            "trainer.v1.trainer_mode to one of colocate_async, separate_async, sync, or trainer.use_v1=False",
        ),
        (
            ["+clipx=grpo", f"{CORRECTION}.rollout_is=nonsense"],
            f"{CORRECTION}.rollout_is=nonsense, {CORRECTION}.rollout_is_threshold=2.0: verl's rollout correction",
        ),
        (
            ["+clipx=observe", f"{CORRECTION}.bypass_mode=True", NO_LOG_PROBS],
            f"{CORRECTION}.bypass_mode=True with {NO_LOG_PROBS}: this needs the rollout's log-probabilities",
        ),
        (["+clipx=acpo", f"{ACTOR}.ppo_epochs=0"], f"{ACTOR}.ppo_epochs=0: no update would be made. Set it to a whole"),
        (
            ["+clipx=gspo", HIGH],
            "clip_ratio_high=0.28 would be clipx.clip_high=1.28: a width over 0.01 is meant for the",
        ),
        (
            ["+clipx=acpo_reference", HIGH],
            "clip_ratio_high=0.28 with +clipx=acpo_reference, which has no fixed bound and would ignore it. Remove "
            f"{ACTOR}.clip_ratio_high. To change how far the ratio may go, set clipx.epsilon_base or clipx.alpha. ",
        ),
        (
            ["+clipx=acpo", f"{ACTOR}.policy_loss.loss_mode=gspo"],
            "loss_mode=gspo but clipx.method=acpo: they contradict",
        ),
        ([f"{ACTOR}.policy_loss.loss_mode=clipx_bapo"], "loss_mode=clipx_bapo without its group"),
        (
            ["+clipx=grpo", "clipx.clip_hihg=1"],
            "clipx.clip_hihg is not a parameter of grpo. Did you mean clipx.clip_h",
        ),
        (["+clipx=acpo", "clipx.alpha=-1"], "clipx.alpha=-1: must be a number (at least 0 and at most 20)"),
        (["+clipx=grpo", f"{ACTOR}.policy_loss.kl_cov_ratio=0.1"], "only verl's own loss kl_cov reads it"),
        (["+clipx=sapo", f"+{ACTOR}.policy_loss.tau_pos=0"], "tau_pos=0 would be clipx.tau_positive=0, which must be"),
        (
            ["+clipx=acpo", "distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False"],
            "use_task_rewards=False with distillation.enabled=True: verl then sets the policy loss to 0",
        ),
        (
            ["+clipx=m2po", "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.top_p=0.8"],
            "with clipx.behaviour=rollout: vllm's log-probabilities are over the tokens that truncation keeps",
        ),
        # verl's own check of the same run.
        (["+clipx=grpo", "data.train_batch_size=128"], "train_batch_size (128) must be >= actor.ppo_mini_batch_size"),
        (["python", "train.py"], "python: is neither KEY=VALUE nor an option"),
        (
            ["python", "-m", "verl.trainer.sft_trainer"],
            "python -m verl.trainer.sft_trainer: not one of verl's entry modules. These are",
        ),
    ],
)
def test_it_refuses_as_the_run_would_without_a_traceback(words, message):
    code, output = explain(*(words if words[0] == "python" else [*NEEDED, *words]))
    assert code == 1 and message in output and "Traceback" not in output


@pytest.mark.slow
def test_a_key_that_verl_does_not_have_is_answered_with_the_nearest():
    misspelt = {
        f"{ACTOR}.clip_ratoi=0.2": f"{ACTOR}.clip_ratio?",
        "algorithm.adv_estimater=grpo": "algorithm.adv_estimator?",
        "actor_rollout_ref.acter.clip_ratio_low=0.2": f"{ACTOR}.clip_ratio_low?",
        "ppo_epochs=2": f"{ACTOR}.ppo_epochs or critic.ppo_epochs?",
    }
    code, output = explain(*NEEDED, "+clipx=acpo", *misspelt, "data.strange=1")
    assert code == 1
    *near, far = output.splitlines()
    assert near == [f"{key}: verl's configuration has no such key. Did you mean {it}" for key, it in misspelt.items()]
    assert far.endswith("no such key. If a part of verl reads it without a default, write +data.strange=1.")


@pytest.mark.slow
def test_an_added_key_that_verl_refuses_is_answered_with_the_nearest():
    assert explain(*NEEDED, f"+{ACTOR}.clip_ratoi=0.2") == (
        1,
        f"+{ACTOR}.clip_ratoi: verl has no such key and refuses it. Did you mean {ACTOR}.clip_ratio?\n",
    )


def test_an_added_key_beside_one_of_nearly_the_same_name_is_noted():
    added = ("+algorithm.adv_estimater=gae", "+algorithm.another=1", "+data.val_batch_sizes=2", "+data.train=1")
    # Alike, but both are new.
    added += ("+data.own_setting=1", "+data.own_settings=2")
    code, output = explain(*NEEDED, *added)
    assert code == 0
    assert [line for line in output.splitlines() if line.startswith("note: ")] == [
        "note: +algorithm.adv_estimater adds a key beside algorithm.adv_estimator, which stays as it is. "
        "Did you mean that one?",
        "note: +data.val_batch_sizes adds a key beside data.val_batch_size, which stays as it is. "
        "Did you mean that one?",
    ]


@pytest.mark.slow
def test_the_older_trainer_makes_its_updates_whatever_the_v1_trainers_keys_say():
    code, output = explain(*NEEDED, "+clipx=sapo", "trainer.use_v1=False", "trainer.v1.trainer_mode=separate_async")
    assert code == 0
    assert "a soft gate and no bounds, every parameter as in its group; loss_agg_mode token-mean (the paper" in output
    assert output.endswith(
        "4 updates per rollout batch: the gate can act\nbounds at the start: a soft gate and no bounds\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["+clipx=sapo", f"+{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_neg=2"],
            [
                f"taken over: {ACTOR}.tau_neg=2 as clipx.tau_negative=2",
                f"taken over: {ACTOR}.policy_loss.tau_pos=1.5 as clipx.tau_positive=1.5",
            ],
        ),
        (
            ["+clipx=grpo", f"{ACTOR}.clip_ratio_c=null"],
            [f"taken over: {ACTOR}.clip_ratio_c=null as clipx.dual_clip=null"],
        ),
    ],
)
def test_it_prints_each_key_of_verls_that_is_taken_over(words, expected):
    code, output = explain(*NEEDED, *words)
    assert code == 0 and output.splitlines()[2:] == expected


FACTS = f"{ACTOR}.policy_loss.run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # A fact about the run, which its line and its loss depend on.
        ([f"{FACTS}.loss_agg_mode=token-mean"], f"{FACTS}.loss_agg_mode=token-mean: the plugin reads this fact about"),
        ([f"{FACTS}.bypass=True"], f"{FACTS}.bypass=True: the plugin reads this fact about the run from the run's"),
        ([f"{FACTS}.epochs=1"], f"{FACTS}.epochs=1: the plugin reads"),
        ([f"{FACTS}.options={{}}"], f"{FACTS}.options={{}}: the plugin reads"),
        ([f"{FACTS}.group=bapo"], f"{FACTS}.group=bapo: the plugin reads"),
        ([f"+{FACTS}.taken.alpha='clip_ratio=2'"], f"{FACTS}.taken="),
        ([f"{FACTS}.paper_loss_agg_mode=token-mean"], f"{FACTS}.paper_loss_agg_mode=token-mean: the plugin reads"),
        ([f"~{FACTS}.epochs"], f"{FACTS}.epochs=null: the plugin reads"),
        ([f"~{FACTS}"], f"{FACTS}=null: the plugin needs these facts"),
        ([f"+{FACTS}.unknown=1"], f"{FACTS}.unknown=1: the plugin reads"),
        # A key of the loss at a place where nothing reads it.
        (
            ["+actor.clip_ratio_high=0.28"],
            f"actor.clip_ratio_high=0.28: nothing reads it there. Set {ACTOR}.clip_ratio_high, which verl reads, or "
            "remove actor.clip_ratio_high.",
        ),
        (
            ["+policy_loss.loss_mode=gspo"],
            f"Set {ACTOR}.policy_loss.loss_mode, which verl reads, or remove",
        ),
        (["+algorithm.clip_ratio_high=0.28"], f"algorithm.clip_ratio_high=0.28: nothing reads it there. Set {ACTOR}."),
        (["+clip_ratio_c=10"], "clip_ratio_c=10: nothing reads it there."),
        ([f"+{ACTOR}.policy_loss.clip_ratio_low=null"], "policy_loss.clip_ratio_low=null: nothing reads it there."),
        ([f"+{ACTOR}.kl_cov_ratio=0.1"], f"Set {ACTOR}.policy_loss.kl_cov_ratio, which verl reads"),
        (["+critic.clip_ratio=0.1"], "critic.clip_ratio=0.1: nothing reads it there."),
        (["+algorithm.loss_agg_mode=token-mean"], "algorithm.loss_agg_mode=token-mean: nothing reads it there."),
        (["+trainer.mine={clip_ratio: 0.1}"], "trainer.mine.clip_ratio=0.1: nothing reads it there."),
        (["+data.dro_beta=0.1"], f"Set {ACTOR}.policy_loss.dro_beta, which verl reads"),
    ],
)
@pytest.mark.slow
def test_what_would_be_ignored_or_would_change_the_line_alone_is_refused(words, message):
    code, output = explain(*NEEDED, "+clipx=acpo", *words)
    assert code == 1 and message in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "group", "message"),
    [
        # verl's default, which the composed configuration does not tell from a key that nobody has set.
        (f"{ACTOR}.clip_ratio_high: 0.2", "dapo", f"{ACTOR}.clip_ratio_high=0.2 would be clipx.clip_high=1.2, but its"),
        (f"{ACTOR}.clip_ratio: 0.2", "dapo", f"{ACTOR}.clip_ratio=0.2 would be clipx.clip_high=1.2, but its"),
        (f"{ACTOR}.clip_ratio_high: 0.28", "acpo", f"{ACTOR}.clip_ratio_high=0.28 with +clipx=acpo, which has no"),
        (f"{FACTS}.epochs: 3", "acpo", f"{FACTS}.epochs=3: the plugin reads this fact"),
        (f"{FACTS}.taken.alpha: clip_ratio=2", "acpo", f"{FACTS}.taken="),
        ("algorithm.clip_ratio_high: 0.28", "acpo", "algorithm.clip_ratio_high=0.28: nothing reads it there."),
    ],
)
@pytest.mark.parametrize("by", ["--config-dir", "--config-path"])
def test_a_file_of_the_users_says_as_much_as_the_command_line(tmp_path, content, group, message, by):
    key, _, value = content.partition(": ")
    *nodes, last = key.split(".")
    lines = [*nodes, f"{last}: {value}"]
    nested = "\n".join(f"{'  ' * depth}{line}{':' * (depth < len(nodes))}" for depth, line in enumerate(lines))
    # A file of the user's is a group, or the whole configuration that begins with verl's.
    if by == "--config-dir":
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "own.yaml").write_text(f"# @package _global_\n{nested}\n")
        words = [f"--config-dir={tmp_path}", f"+clipx={group}", "+mine=own"]
    else:
        begins = "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: "
        (tmp_path / "own.yaml").write_text(f"{begins}[ppo_trainer, clipx: {group}, _self_]\n{nested}\n")
        words = [f"--config-path={tmp_path}", "--config-name=own"]
    code, output = explain("python3", "-m", "verl.trainer.main_ppo", *words, *NEEDED)
    assert code == 1 and message in output and "Traceback" not in output


@pytest.mark.slow
def test_a_file_that_says_what_the_run_trains_changes_nothing(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text(
        "# @package _global_\nactor_rollout_ref:\n  actor: {clip_ratio: 0.2, clip_ratio_low: 0.2, loss_agg_mode: "
        "token-mean}\ndata: {own_kwargs: {clip_ratio: 0.3}}\n"
    )
    words = ("python", "-m", "verl.trainer.main_ppo", f"--config-dir={tmp_path}", *NEEDED, "+clipx=grpo")
    assert explain(*words, "+mine=own") == explain(*words)
    assert explain(*words)[0] == 0
    # What ce_gppo's group has not, and verl's default is taken over where somebody has set it.
    (tmp_path / "mine" / "own.yaml").write_text(f"# @package {ACTOR}\nclip_ratio_c: 3.0\n")
    code, output = explain(*words[:-1], "+clipx=ce_gppo", "+mine=own")
    assert code == 0 and f"taken over: {ACTOR}.clip_ratio_c=3.0 as clipx.dual_clip=3" in output


MODIFIERS = ("select=high_entropy", "shaping=advantage_reweighting", "update=lopti", "trace=prompts")


@pytest.mark.slow
@pytest.mark.parametrize("modifiers", [*((one,) for one in MODIFIERS), MODIFIERS[:2], MODIFIERS])
def test_a_modifier_without_a_method_is_refused_by_its_name(modifiers):
    code, output = explain(*NEEDED, *(f"+clipx/{modifier}" for modifier in modifiers))
    assert code == 1
    for modifier in modifiers:
        assert f"+clipx/{modifier.partition('=')[0]}" in output
    assert "added to a method, and none is chosen. Choose one as well, for example +clipx=grpo." in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("clipx=acpo", "Did you mean +clipx=acpo?"),
        ("clipx=apco", "Did you mean +clipx=acpo?"),
        ("clipx=ours", "Did you mean +clipx=ours?"),
        ("clipx/select=high_entropy", "Did you mean +clipx/select=high_entropy?"),
        ("hardware=cpu", "Did you mean +hardware=cpu?"),
        ("recipe=acpo/grpo", "Did you mean +recipe=acpo/grpo?"),
        ("clipx.alpha=2", "Choose a method by its group, for example +clipx=grpo"),
    ],
)
def test_a_group_without_its_plus_is_answered_with_it(word, answer):
    code, output = explain(*NEEDED, word)
    assert code == 1 and f"{word}: verl's configuration has no such key. {answer}" in output


MODEL_OF_IMAGES = Path(__file__).parent / "fixtures" / "models" / "of_images"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([f"{ACTOR}.strategy=fsdp2"], None),
        ([], f"{ACTOR}.strategy=fsdp"),
        (["model_engine=megatron"], f"{ACTOR}.strategy=megatron"),
        (["model_engine=veomni"], f"{ACTOR}.strategy=veomni"),
        (["model_engine=torchtitan"], f"{ACTOR}.strategy=torchtitan"),
        ([f"{ACTOR}.strategy=fsdp2", "actor_rollout_ref.rollout.name=sglang"], "actor_rollout_ref.rollout.name=sglang"),
        ([f"{ACTOR}.strategy=fsdp2", f"actor_rollout_ref.model.path={MODEL_OF_IMAGES}"], "images and videos"),
        (
            [f"{ACTOR}.strategy=fsdp2", "algorithm.adv_estimator=optimal_token_baseline"],
            "algorithm.adv_estimator=optimal_token_baseline",
        ),
        (
            ["actor_rollout_ref.rollout.name=sglang", f"{ACTOR}.qat.enable=True"],
            f"{ACTOR}.strategy=fsdp, actor_rollout_ref.rollout.name=sglang, QAT",
        ),
    ],
)
def test_the_line_names_the_options_that_no_test_has_run(words, options):
    code, output = explain(*NEEDED, "actor_rollout_ref.rollout.name=vllm", "+clipx=acpo", *words)
    assert code == 0, output
    if options is None:
        assert "no test has run" not in output
    else:
        assert f"; no test has run {options}; old_log_probs" in output


@pytest.mark.slow
def test_neither_the_hub_nor_vllm_is_asked(monkeypatch):
    # With a network and without one, the answer is the same.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    for module in [name for name in sys.modules if name.startswith("verl.workers.rollout.vllm_rollout")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "vllm", None)
    models = ["actor_rollout_ref.model.path=some/model", "critic.model.path=some/critic"]
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=vllm"]
    critic = ["algorithm.adv_estimator=gae", *models, "+clipx=acpo"]
    code, output = explain(*NEEDED, *critic, "critic.ppo_micro_batch_size_per_gpu=4", *lora)
    assert code == 0 and output.startswith("clipx: clipx_acpo (+clipx=acpo)"), output
    # What verl's check says of the rest of the critic stands.
    code, output = explain(*NEEDED, *critic)
    assert code == 1 and "[critic] Please set at least one of 'critic.micro_batch_size'" in output


def test_it_says_where_the_plugin_has_no_part():
    line = "clipx: no part in this run, which trains verl's own loss vanilla"
    assert explain(*NEEDED, HIGH) == (0, f"{line}\nbounds at the start: ratio 0.8 to 1.28; clip_ratio_c 3\n")
    assert explain(*NEEDED, f"{ACTOR}.policy_loss.loss_mode=gspo")[1].endswith(
        "bounds at the start: those of verl's own loss gspo, which the plugin does not know\n"
    )


@pytest.mark.parametrize(
    ("method", "values", "expected"),
    [
        ("grpo", dict(clip_low=None, clip_high=1.28), "ratio up to 1.28; dual_clip 3"),
        ("cispo", dict(clip_low=0, clip_high=None, mask_high=1.3), "ratio without bounds; mask_high 1.3"),
        ("gspo", dict(clip_high=None), "sequence's ratio from 0.9997"),
        ("dppo", dict(threshold_low=None), "divergence (tv) of the token's probability up to 0.2; weight_high 5"),
        (
            "acpo",
            dict(epsilon_max=3, dual_clip=3),
            "ratio 1 - epsilon to 1 + epsilon, epsilon = 3 σ + 0.2, epsilon up to 3, σ of the ratio in each of 5 bins "
            "of the old probability; 0.8 to 1.2 where the ratio does not vary; dual_clip 3",
        ),
        (
            "bapo",
            {},
            "searched until P/(P+N) is at least 0.4 (P and N: what positive and negative tokens contribute to the "
            "loss): the lower one from 0.6 up to 0.9 in steps of 0.02, the upper one from 1.2 up to 3 in steps of "
            "0.05, the upper one first",
        ),
        ("m2po", {}, "log-ratio -tau to tau, the largest tau with a second moment of at most 0.04"),
        (
            "dcpo",
            {},
            "(r - 1) r q from -0.16 to 0.2, q the token's old probability; ratio from 0.5 and up to 10; dual_clip 10",
        ),
        ("topr", {}, "truncated weights and no bounds"),
    ],
)
def test_the_bounds_in_words(method, values, expected):
    assert of_method(METHODS[method](**values)) == expected


@pytest.mark.slow
def test_the_other_entries_and_hydras_options(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: [ppo_trainer, clipx: dapo, _self_]\n"
    )
    fully_async = list(ENTRIES)[2]
    _, output = explain("python", "-m", fully_async, "+clipx=bapo", "async_training.require_batches=2")
    assert output.startswith("clipx: clipx_bapo (+clipx=bapo), scope mini_batch,")
    assert "the rollout's own (bypass_mode); 2 updates per rollout batch: clipping can act\n" in output
    _, output = explain("--config-path", str(tmp_path), "--config-name=mine", *NEEDED)
    assert output.startswith("clipx: clipx_grpo (+clipx=dapo), fixed bounds, every parameter as in its group")
    (tmp_path / "clipx").mkdir()
    (tmp_path / "clipx" / "ours.yaml").write_text("# @package _global_\ndefaults: [bapo]\nclipx: {target: 0.61}\n")
    _, output = explain("python", "-m", "verl.trainer.main_ppo", f"--config-dir={tmp_path}", *NEEDED, "+clipx=ours")
    assert output.startswith("clipx: clipx_bapo (+clipx=ours), scope mini_batch, target=0.61")
    code, output = explain("--config-dir", str(tmp_path / "none"), *NEEDED)
    assert code == 1 and "--config-dir" in output and "Traceback" not in output


@pytest.mark.slow
def test_nothing_but_the_answer_is_printed():
    command = [sys.executable, "-m", "verl_clipx.cli", "explain", "--", *NEEDED, "+clipx=dapo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # verl warns of a machine without a GPU while it is imported.
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)


def test_without_a_command_it_says_how():
    code, output = explain()
    assert code == 2 and "clipx explain -- python -m verl.trainer.main_ppo" in output


@pytest.mark.parametrize("module", ENTRIES)
def test_the_entries_are_verls(module):
    source = inspect.getsource(import_module(module))
    assert re.search(rf'@hydra.main\(config_path="config", config_name="{ENTRIES[module]}"', source)
    # Where the plugin decides: before Ray, with the configuration.
    assert source.index("auto_set_device(config)") < source.rindex("run_ppo(config")
