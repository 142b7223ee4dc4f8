"""May this run be launched? What verl's driver answers under CLIPX_EXPLAIN, and then ends before Ray starts.

Nothing of the model, the tokenizer, the critic or the data is loaded, and no accelerator is needed.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_clipx.base.method import NODE, Limit, Method, interval
from verl_clipx.base.refusal import Refusal, written
from verl_clipx.common.files import EMPTY
from verl_clipx.common.run_files import log_path, own_log_path, record_path
from verl_clipx.common.secrets import redact
from verl_clipx.modifiers.hold import solved_parameters
from verl_clipx.run.announcement import (
    REMEDIES,
    VERL_LIMIT,
    averages,
    biased_ratios,
    changed_parameters,
    corrections,
    ratio_to,
    shown,
    source_of_old_log_probs,
    uncorrected,
    untested_options,
    updates,
)
from verl_clipx.run.config import Settings, clip_range
from verl_clipx.run.divisibility import what_does_not_divide
from verl_clipx.run.explain import EXPLAIN
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.groups import group_names
from verl_clipx.run.keys import ACTOR, LOSS_MODE, MINI_BATCH, RESPONSES, ROLLOUT, distillation_term, read
from verl_clipx.run.lengths import lengths_of
from verl_clipx.run.resolve import NAMES
from verl_clipx.run.schedule import Schedule, schedule_of
from verl_clipx.run.start import Decision, decide
from verl_clipx.run.support import has_run_on
from verl_clipx.run.unknown_keys import absent, refused_by_verl
from verl_clipx.run.user_keys import chosen_group, keys_set_by_user

# Hydra's overrides under which it writes nothing here.
NOTHING_WRITTEN = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
# Parameters that say nothing to a reader who wants to know what is trained: guards against extreme numbers.
NO_SETTING = ("log_ratio_clamp", "min_tokens", "epsilon", "variance_epsilon")
# Those that change how a loss is computed or watched, and not what is trained.
NOT_TRAINED = ("compile", "metrics", "receipt", "log", "health", "missing_state")
# Which tokens the statistics behind the bounds are of.
SCOPES = {
    "mini_batch": "statistics of all tokens of an update, on all ranks",
    "lagged": "statistics of the same update of the rollout batch before",
    "micro_batch": "statistics of each micro-batch by itself",
}
NO_SUCH_KEY = re.compile(r"Could not override '(.+)'\.")


@dataclass(frozen=True)
class Answer:
    """What a run would train, what it would cost and write, and what stops it.

    Args:
        loss: the loss, its group and its scope.
        loss_mode: the loss's name in verl's registry; None if there is no policy loss.
        of_the_plugin: whether the plugin has a part in the run.
        line: the line that the run prints; None if the plugin has no part in it, or it stops.
        settings: the method's parameters, and whose they are.
        bounds: the bounds that the loss starts with, or what they are computed from.
        updates: how many updates a rollout batch gets, of how many responses, and whether clipping can act in them.
        ratio: the policy that the ratio is to, and where old_log_probs come from.
        averages: verl's aggregation mode and, if it differs, the paper's.
        of_verl: what verl adds to the loss, to the rewards and to the samples' weights, in words.
        taken: from parameters of the method to verl's key and value that they take over.
        unused: from clip keys of verl's that the method does not read to their values.
        uncorrected: that stale samples are not corrected, and what would correct them.
        cut: that responses end before data.max_response_length, if the server's context does not hold them.
        untested: options of the run that no test has run.
        has_run_on: the devices on which the plugin has run, and whether such a run has; None if it has no part in it.
        cost: what the loss costs beyond verl's own.
        files: from what the run keeps (log, record, traces) to where.
        receipt: what happens if the gradient of the first rollout batch is not the announced one.
        stops: what stops the run, in sentences.
        arguments: the overrides that the trainer was given; None if Hydra did not read them, or for a sweep.
    """

    loss: str
    loss_mode: str | None = None
    of_the_plugin: bool = False
    line: str | None = None
    settings: str | None = None
    bounds: str | None = None
    updates: str | None = None
    ratio: str | None = None
    averages: str | None = None
    of_verl: list[str] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    unused: dict[str, Any] = field(default_factory=dict)
    uncorrected: str | None = None
    cut: str | None = None
    untested: list[str] = field(default_factory=list)
    has_run_on: str | None = None
    cost: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    receipt: str | None = None
    stops: list[str] = field(default_factory=list)
    arguments: list[str] | None = None

    @property
    def text(self) -> list[str]:
        """The answer in lines."""
        parameters = {
            source: " and ".join(f"{NODE}.{name}" for name, of in self.taken.items() if of == source)
            for source in self.taken.values()
        }
        taken = ", ".join(f"verl's {source} as {names}" for source, names in parameters.items())
        unused = ", ".join(f"verl's {key}={written(value)}" for key, value in self.unused.items())
        rows = {
            "settings": self.settings,
            "takes over": f"{taken}; remove the key to keep the group's value" if taken else "",
            "does not read": unused,
            "bounds": self.bounds,
            "updates": self.updates,
            "ratio": self.ratio,
            "averages": self.averages,
            "verl adds": ", ".join(self.of_verl),
            "samples": self.uncorrected,
            "responses": self.cut,
            "costs": self.cost,
            "writes": ", ".join(f"{where} ({what})" for what, where in self.files.items()),
            "receipt": self.receipt,
            "no test has run": ", ".join(self.untested),
            "has run on": self.has_run_on,
        }
        lines = [self.loss, *(f"  {head}: {text}" for head, text in rows.items() if text)]
        return lines + ([f"stops: {why}" for why in self.stops] or ["Nothing in the configuration stops it."])


def answer(config: DictConfig, *, named: Mapping[str, Any] = EMPTY, group: str | None = None) -> Answer:
    """What a run with this configuration would do; `named` and `group` are as for `resolve.resolve`."""
    if OmegaConf.select(config, ROLLOUT) is None:
        asked = [f"+{NODE}={group}: nothing reads it in supervised training. Remove it."] if NODE in config else []
        return Answer("no policy loss: this is supervised training, in which the plugin has no part", stops=asked)
    loss_mode = OmegaConf.select(config, LOSS_MODE)
    try:
        decision = decide(config, named=named, group=group)
    except ValueError as error:
        stops = [str(part) for part in error.all] if isinstance(error, Refusal) else [str(error)]
        return Answer(f"{loss_mode}, refused", loss_mode, NODE in config, stops=stops)
    if decision is not None:
        stops = [*refused_by_verls_check(config), *what_does_not_divide(config)]
        return dataclasses.replace(of_decision(config, decision), stops=stops)
    values = read(config)
    run = RunFacts(options=values, schedule=schedule_of(values))
    return Answer(
        f"{loss_mode}, verl's own loss; the plugin has no part in this run",
        loss_mode,
        bounds=bounds_of_verl(config.actor_rollout_ref.actor),
        updates=updates_of(run, limit_of_verl(loss_mode)),
        averages=run.loss_agg_mode if loss_mode == "vanilla" else None,
        of_verl=terms(config),
        cut=cut_by_context(config),
        stops=[*refused_by_verls_check(config), *what_does_not_divide(config)],
    )


def of_decision(config: DictConfig, decision: Decision) -> Answer:
    """The answer to a configuration in which the plugin has a part and that the driver does not refuse."""
    loss_mode, settings, run = decision.resolved
    trains = isinstance(settings, Settings)
    others = [*corrections(run, observed=not trains), distillation_term(run.options), biased_ratios(run, settings)]
    common = {
        "line": decision.line,
        "averages": averages(run, settings).removeprefix("loss_agg_mode "),
        "of_verl": [*terms(config), *filter(None, others)],
        "uncorrected": f"{missing}. Add {REMEDIES}" if (missing := uncorrected(run, settings)) else None,
        "cut": cut_by_context(config),
        "untested": untested_options(run),
        "has_run_on": has_run_on(config),
        "files": files(config, settings),
    }
    if not trains:
        loss = f"{loss_mode}, verl's own loss, observed (+{NODE}=observe)"
        bounds = bounds_of_verl(config.actor_rollout_ref.actor)
        made = updates_of(run, limit_of_verl(loss_mode))
        return Answer(loss, loss_mode, True, bounds=bounds, updates=made, cost="metrics only", **common)
    to, source = ratio_to(run, settings).removeprefix("ratio "), source_of_old_log_probs(run)
    chosen = f" (+{NODE}={run.group})" if run.group else ""
    scope = f", scope {settings.scope}: {SCOPES[settings.scope]}" if settings.adaptive else ""
    return Answer(
        f"{NODE}_{settings.method.name}{chosen}{scope}",
        loss_mode,
        True,
        settings=settings_of(settings, run),
        bounds=bounds_of(settings.method),
        updates=updates_of(run, settings.method.what_limits, always=settings.method.acts_at_ratio_one),
        ratio=f"{to}, which {source}" if to.endswith("old_log_probs") else f"{to}; old_log_probs {source}",
        taken={parameter: f"{of['key']}={written(of['given'])}" for parameter, of in run.taken.items()},
        unused={key.removeprefix(f"{ACTOR}."): value for key, value in run.unused.items()},
        cost=cost(settings, run.schedule),
        receipt=of_receipt(settings, run),
        **common,
    )


def settings_of(settings: Settings, run: RunFacts) -> str:
    """A method's parameters, and whose they are: `alpha 3, epsilon_base 0.2, 5 bins: the paper's`."""
    own = [
        f"{shown(value)} bins" if name == "bins" else f"{name} {shown(value)}"
        for name, value in settings.method.parameters.items()
        if name not in NO_SETTING and not isinstance(value, bool | str) and value
    ]
    changed = [
        f"{field.name}={shown(value)} (group: {shown(of_group)})"
        for field, value, of_group in changed_parameters(settings, run)
        if field.name not in (*NOT_TRAINED, *solved_parameters(settings.method))
    ]
    if settings.hold is not None:
        changed.insert(0, f"bounds that hold {settings.method.held_target}")
    group = run.group
    whose = "the released code's" if str(group).endswith("_reference") else "the paper's"
    if group == "custom" or group not in group_names():
        whose = "its group's" if group else "its defaults"
    whose += f" but for {', '.join(changed)}" if changed else ""
    return f"{', '.join(own) or 'no parameters'}: {whose}"


def updates_of(run: RunFacts, limit: Limit, *, always: str = "") -> str:
    """The number of updates and whether limits can act, the responses of each, and the steps without any."""
    mini_batch, responses = run.options.get(MINI_BATCH), run.options.get(RESPONSES)
    size = f" of {mini_batch} prompts x {responses} response{'s' * (responses > 1)}" if mini_batch and responses else ""
    warmup = run.critic_warmup
    made = updates(run.schedule, limit, always=always, size=size)
    return made + (f"; steps before {warmup} update only the critic" if warmup > 1 else "")


def bounds_of(method: Method) -> str:
    """A method's bounds and its other limits, in words."""
    others = (f"{key} {value:g}" for key in method.other_limits if (value := getattr(method, key)) is not None)
    return "; ".join([method.starting_bounds, *others])


def limit_of_verl(loss_mode: str) -> Limit:
    """What limits a loss of verl's own, which the plugin knows of vanilla only."""
    return Limit("", "clipping") if loss_mode == "vanilla" else VERL_LIMIT


def bounds_of_verl(actor: DictConfig) -> str:
    """The bounds of verl's own loss, in words. They are known only for vanilla, verl's default loss."""
    loss_mode = actor.policy_loss.loss_mode
    if loss_mode != "vanilla":
        return f"those of verl's own loss {loss_mode}, which the plugin does not know"
    return f"ratio {interval(*clip_range(actor))}; clip_ratio_c {actor.clip_ratio_c:g}"


def terms(config: DictConfig) -> list[str]:
    """What verl adds to the loss or to the rewards: entropy bonus and KL; and that it has a critic."""
    from verl.trainer.ppo.utils import need_critic

    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    with warnings.catch_warnings():
        # verl warns of each run that has none.
        warnings.simplefilter("ignore")
        has_critic = need_critic(config)
    return [
        f"entropy bonus {actor.entropy_coeff:g}" if actor.entropy_coeff else "no entropy bonus",
        f"KL loss {actor.kl_loss_type} {actor.kl_loss_coef:g}" if actor.use_kl_loss else "no KL loss",
        *([f"KL penalty in the rewards {algorithm.kl_ctrl.kl_coef:g}"] if algorithm.use_kl_in_reward else []),
        *(["the critic's own loss"] if has_critic else []),
    ]


def cut_by_context(config: DictConfig) -> str | None:
    """That the server's context ends responses early; None if it holds the longest prompt with its response."""
    prompt, (response, context) = config.data.max_prompt_length, lengths_of(config)
    if context is None or response is None or context >= prompt + response:
        return None
    whole = f"{response} beside the longest prompt, of {prompt} (data.max_prompt_length)"
    return (
        f"cut by {ROLLOUT}.max_model_len={config.actor_rollout_ref.rollout.max_model_len}: it holds less than {whole}"
    )


def cost(settings: Settings, schedule: Schedule) -> str:
    """Returns what the loss costs beyond verl's own."""
    extra = [f"one extra forward pass {schedule.extra_passes}"] if schedule.extra_passes else []
    passes = extra + ["a second pass of each update (Lopti)"] * (len(schedule.passes) == 2)
    of_scope = extra and settings.adaptive and settings.scope == "mini_batch" and not schedule.selects_by_pass
    can_lag = not schedule.second_stage and "entropy" not in settings.method.asks_for
    return (" and ".join(passes) or "no extra pass") + f"; {NODE}.scope=lagged needs none" * bool(of_scope and can_lag)


def of_receipt(settings: Settings, run: RunFacts) -> str:
    """What happens if the gradient of the first rollout batch is not the announced one."""
    if settings.receipt == "off":
        return "off: nothing checks that this loss is what the run trains"
    if settings.receipt == "warn":
        return "warns if the first rollout batch trains another loss"
    always = "stops the run if the first rollout batch trains another loss"
    if settings.receipt == "stop" or not run.untested:
        return always
    return f"{always}; its checks of the engine, which no test has run, only warn"


def files(config: DictConfig, settings: Any) -> dict[str, str]:
    """Where a run's log, record and traces go."""
    log = own_log_path(config)
    kept = {} if log is None else {"log": str(log), "record": str(record_path(log))}
    loggers = config.trainer.get("logger") or ()
    if log is None and "file" in ([loggers] if isinstance(loggers, str) else loggers):
        kept = {"verl's log": str(log_path(*(config.trainer.get(name) for name in NAMES)))}
    return kept | ({} if settings.trace is None else {"traces": str(settings.trace.folder)})


def refused_by_verls_check(config: DictConfig) -> list[str]:
    """What verl's own check of a configuration refuses, without those parts that need the critic's model or vLLM."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    if "async_training" in config:
        # verl's fully asynchronous main does not call it.
        return []
    config = config.copy()
    with open_dict(config):
        # verl would load the critic's tokenizer from the hub, and ask an installed vLLM for its LoRA ranks.
        config.critic.model = None
        config.actor_rollout_ref.model.lora_rank = 0
        if OmegaConf.select(config, "actor_rollout_ref.model.lora.rank"):
            config.actor_rollout_ref.model.lora.rank = 0
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            validate_config(config, need_reference_policy(config), need_critic(config))
        except InstantiationException as error:
            return [str(refused_by_verl(error, config))]
        except Exception as error:
            return [f"verl refuses it: {error}"]
    return []


def end_with(answered: Answer) -> NoReturn:
    """Hands an answer over and ends this process.

    Where it prints the answer, the exit code says whether something stops the run. Where it writes to a file, a script
    goes on in any case.
    """
    target = os.environ[EXPLAIN]
    if target == "1":
        print("\n".join(redact(answered.text)), flush=True)
        raise SystemExit(1 if answered.stops else 0)
    with open(target, "a") as file:
        file.write(json.dumps({**dataclasses.asdict(answered), "text": answered.text}) + "\n")
    raise SystemExit(0)


# The overrides of keys that verl's configuration does not have, which Hydra has composed without.
_unknown: list[str] = []


def answer_and_end(config: DictConfig) -> NoReturn:
    """Takes the place of a start of verl's: answers, and ends this process."""
    unknown = [absent(word, config) for word in _unknown]
    answered = answer(config, named=keys_set_by_user(), group=chosen_group())
    arguments = None
    if HydraConfig.initialized() and (hydra := HydraConfig.get()).mode != RunMode.MULTIRUN:
        arguments = [*hydra.overrides.task, *hydra.overrides.hydra, *_unknown]
    elif HydraConfig.initialized():
        answered = dataclasses.replace(answered, loss=f"only the first run of a sweep is explained: {answered.loss}")
    end_with(dataclasses.replace(answered, stops=[*unknown, *answered.stops], arguments=arguments))


def end_without_configuration() -> NoReturn:
    """Takes the place of ray.init: a process that comes so far has shown no configuration."""
    why = "Ray would start here, and verl's trainer has shown no configuration."
    end_with(Answer("no configuration seen", stops=[why]))


def run_hydra(run: Callable[..., None], args: argparse.Namespace, **named: Any) -> None:
    """Runs a hydra.main so that Hydra writes nothing, and answers where a configuration does not compose."""
    # Otherwise Hydra would print its errors itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    given = [*args.overrides]
    args.overrides += [*NOTHING_WRITTEN, f"hydra.sweep.dir={tempfile.gettempdir()}"]
    _unknown.clear()
    while True:
        try:
            return run(args=args, **named)
        except (HydraException, OmegaConfBaseException) as error:
            key = NO_SUCH_KEY.match(str(error))
            words = [word for word in args.overrides if key and word.partition("=")[0] == key[1]]
            if not words:
                why = str(error).partition("\n\n")[0]
                if isinstance(error, OverrideParseException):
                    why = f"{error.override}: is no override of Hydra's: {why.splitlines()[0]}"
                    if not (error.override or "").strip():
                        why = "a blank stands where an override should. After a backslash it ends a command: remove it."
                end_with(Answer("a configuration that does not compose", stops=[why], arguments=given))
            _unknown.extend(words)
            args.overrides = [word for word in args.overrides if word not in words]
