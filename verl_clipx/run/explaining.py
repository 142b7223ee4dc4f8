"""Answers for verl's driver under CLIPX_EXPLAIN, in place of a start: it prints the run's description and ends.

Nothing of the model, the tokenizer, the critic or the data is loaded, and no accelerator is needed.
"""

import atexit
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_clipx.common.secrets import redact
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.refusal import Refusal, format_exactly
from verl_clipx.run.config import clip_range
from verl_clipx.run.description import (
    IF_IT_CLIPS,
    Description,
    describe_interval,
    describe_updates,
    describe_without_plugin,
    format_value,
)
from verl_clipx.run.divisibility import counted_nothing, what_does_not_divide, wrong_numbers
from verl_clipx.run.explain import EXPLAIN
from verl_clipx.run.keys import (
    CHECKPOINTS_GRADIENTS,
    CONTEXT,
    CRITIC_MODEL,
    LEARNING_RATE,
    LOADED_CONTENTS,
    LONGEST_PROMPT,
    LORA_RANK,
    LORA_RANK_BEFORE,
    LOSS_MODE,
    ROLLOUT,
    ROLLOUT_IS,
    Leaves,
    read,
)
from verl_clipx.run.lengths import find_response_limits
from verl_clipx.run.record import Loss, RunRecord, fields_of
from verl_clipx.run.resolve import Resolved
from verl_clipx.run.run_files import log_path, logs_to_file, own_log_path, record_path, resumed_step
from verl_clipx.run.sampling import is_number
from verl_clipx.run.schedule import schedule_of
from verl_clipx.run.start import resolve_into_config, said_by_command_line
from verl_clipx.run.support import describe_support, read_costs, tested_values
from verl_clipx.run.trainer import FULLY_ASYNC, trainer_of

# Hydra's overrides under which it writes nothing here.
NOTHING_WRITTEN = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")

# A weight that users have seen, at which a response hardly counts.
SMALL_WEIGHT = 0.06

# The configuration of the hydra.main that began last in this process; None: none has begun.
_main_configuration: DictConfig | None = None


def answer(config: DictConfig, *, named: Collection[str] = (), group: str | None = None) -> Description:
    """Describe what a run with this configuration would do; the arguments are those of `resolve.resolve`."""
    if OmegaConf.select(config, ROLLOUT) is None:
        stops = []
        if NODE in config:
            stops.append(f"+{NODE}={group}: nothing reads it in supervised training. Remove it.")
        return Description("no policy loss: this is supervised training, in which the plugin has no part", stops=stops)
    loss_mode = OmegaConf.select(config, LOSS_MODE)
    try:
        resumes = describe_resumption(config)
        resolved = resolve_into_config(config, named=named, group=group)
    except ValueError as error:
        errors = error.all if isinstance(error, Refusal) else [error]
        return Description(
            f"{format_exactly(loss_mode)}, refused",
            loss_mode,
            of_the_plugin=NODE in config,
            stops=[str(part) for part in errors],
        )
    if resolved is None:
        record = dataclasses.replace(fields_of(Leaves(config)), schedule=schedule_of(read(config)))
    else:
        record = resolved.record
    stops = wrong_numbers(config)
    if not stops:
        # With a wrong number verl's check would only say that it cannot calculate.
        stops = [*run_verls_check(config), *what_does_not_divide(config)]
    common = {
        "resumes": resumes,
        "cut": describe_cut_responses(record),
        "uncounted": describe_uncounted(config),
        "stops": stops,
    }
    if resolved is None:
        what_acts = "clipping" if loss_mode == "vanilla" else IF_IT_CLIPS
        return Description(
            f"{format_exactly(loss_mode)}, verl's own loss; the plugin has no part in this run",
            loss_mode,
            bounds=describe_bounds_of_verl(record.loss),
            updates=describe_updates(record, what_acts, in_full=True),
            averages=record.aggregation_mode if loss_mode == "vanilla" else None,
            of_verl=describe_terms(config, record),
            **common,
        )
    description = resolved.description
    settings = resolved.clipx
    return dataclasses.replace(
        description,
        bounds=description.bounds or describe_bounds_of_verl(record.loss),
        of_verl=[*describe_terms(config, record), *description.of_verl],
        tested={option: values for option in description.untested if (values := tested_values(option))},
        has_run_on=describe_support(config),
        extra_pass=describe_extra_pass(config, resolved),
        sequence_weights=describe_sequence_weights(record),
        files=list_files(config, settings),
        traces=describe_traces(resolved),
        **common,
    )


def describe_bounds_of_verl(loss: Loss) -> str:
    """Return the bounds of verl's own loss in words. The plugin knows only those of vanilla, verl's default loss."""
    if loss.mode != "vanilla":
        return f"those of verl's own loss {format_exactly(loss.mode)}, which the plugin does not know"
    for side in ("low", "high"):
        key = f"clip_ratio_{side}"
        if loss.widths.get(key) is None:
            # verl's loss then reads this key.
            key = "clip_ratio"
        width = loss.widths.get(key)
        if not is_number(width):
            return f"none: verl stops at {key}={format_exactly(width)}, which is no number"
    bounds = f"ratio {describe_interval(*clip_range(loss.widths))}"
    dual_clip = loss.widths.get("clip_ratio_c")
    if not is_number(dual_clip):
        return f"{bounds}; clip_ratio_c {format_exactly(dual_clip)}, at which verl stops"
    return f"{bounds}; clip_ratio_c {dual_clip:g}"


def describe_terms(config: DictConfig, record: RunRecord) -> list[str]:
    """Return in words what verl adds: an entropy bonus, the KL in the loss or in the rewards, the critic's loss."""
    from verl.trainer.ppo.utils import need_critic

    recorded = record.terms
    in_words = []
    if recorded.entropy:
        in_words.append(f"entropy bonus {format_value(recorded.entropy)}")
    else:
        in_words.append("no entropy bonus")
    if recorded.kl_loss:
        in_words.append(f"KL loss {format_value(recorded.kl_loss_kind)} {format_value(recorded.kl_loss_coefficient)}")
    else:
        in_words.append("no KL loss")
    if recorded.kl_in_reward:
        in_words.append(f"KL penalty in the rewards {format_value(recorded.kl_in_reward_coefficient)}")
    with warnings.catch_warnings():
        # verl warns of each run that has none.
        warnings.simplefilter("ignore")
        has_critic = need_critic(config)
    if has_critic:
        in_words.append("the critic's own loss")
    return in_words


def describe_resumption(config: DictConfig) -> str | None:
    """Return the remark that the run resumes, with the learning rate of its checkpoint.

    Returns:
        The remark; None if no checkpoint is resumed, or one without its optimizer.
    """
    step = resumed_step(config)
    contents = OmegaConf.select(config, LOADED_CONTENTS)
    if not step or (contents is not None and "optimizer" not in contents):
        return None
    return f"the checkpoint of step {step}, whose learning rate verl restores, whatever {LEARNING_RATE} says"


def describe_uncounted(config: DictConfig) -> str | None:
    """Return the remark that the script found no node or no GPU to count on this machine; None if it needed none."""
    uncounted_keys = counted_nothing(config)
    if not uncounted_keys:
        return None
    given = " and ".join(f"{key}={format_exactly(OmegaConf.select(config, key))}" for key in uncounted_keys)
    numbers = " ".join(f"{key}=N" for key in uncounted_keys)
    return (
        f"{given}: 0 was counted here. Where the run starts it is counted again, and whether batches divide depends "
        f"on it; add {numbers} to the command to have that checked"
    )


def describe_cut_responses(record: RunRecord) -> str | None:
    """Return the remark that the rollout's context cuts responses.

    Returns:
        The remark; None if the longest prompt and the longest response fit into the context, or a length is unknown.
    """
    prompt = record.limits.prompt
    response, usable_context = find_response_limits(record)
    if response is None or usable_context is None or not is_number(prompt) or prompt + response <= usable_context:
        return None
    context = f"{CONTEXT}={record.limits.context}"
    if usable_context < record.limits.context:
        context += ", of which SGLang keeps a token free"
    room = max(usable_context - prompt, 0)
    return (
        f"cut by {context}: beside a prompt of {prompt} tokens ({LONGEST_PROMPT}) there is room for {room}, and a "
        f"response may have {response}"
    )


def describe_extra_pass(config: DictConfig, resolved: Resolved) -> str | None:
    """Return what the extra pass costs by formula, in time, memory and bytes between ranks; None without such a pass.

    The unit of time is one forward pass over a rollout batch. A backward pass takes two, and gradient checkpointing
    makes one more forward pass.
    """
    from verl.trainer.ppo.utils import need_reference_policy

    settings = resolved.clipx
    schedule = resolved.record.schedule
    if not settings.trains or schedule.extra_passes != "before each update":
        return None
    if OmegaConf.select(config, CHECKPOINTS_GRADIENTS):
        passes_of_update = 4
        share_of_update = "a quarter of an update (with gradient checkpointing)"
    else:
        passes_of_update = 3
        share_of_update = "a third of an update"
    # Each epoch repeats the updates and the extra pass. old_log_probs and the reference take a pass each, once.
    epochs = resolved.record.batch.epochs or 1
    passes_once = int(resolved.record.trainer.recomputes_old) + int(need_reference_policy(config))
    share_of_step = epochs / (epochs * passes_of_update + passes_once)
    cost = (
        f"by formula a forward pass is {share_of_update}, and {100 * share_of_step:.0f} % of a step's other passes, so "
        "less than that of a step with its rollout; no activations are kept, and of the logits those of one micro-batch"
    )
    size = settings.method.statistics_size + settings.method.second_statistics_size
    if settings.adaptive and size:
        # The statistics and the number of tokens, all in float64.
        cost += f"; {8 * (size + 1):,} bytes are all-reduced an update"
    return cost


def describe_sequence_weights(record: RunRecord) -> str | None:
    """Return the remark that weights by sequence make long responses hardly count.

    Returns:
        The remark; None without such weights, or if the longest response is unknown.
    """
    if record.correction.weights != "sequence":
        return None
    length = find_response_limits(record).response
    if length is None:
        return None
    mean = abs(math.log(SMALL_WEIGHT)) / length
    return (
        f"{ROLLOUT_IS}=sequence multiplies the ratios of all tokens of a response: in one of {length:,} tokens, a "
        f"log-ratio that is {mean:.2g} below 0 on average already makes its weight {SMALL_WEIGHT}, so that long "
        f"responses hardly count; {ROLLOUT_IS}=token weighs each token by its own ratio"
    )


def list_files(config: DictConfig, settings: Any) -> dict[str, str]:
    """Return the paths that a run writes to, by their content: log, record, verl's log, traces.

    Args:
        config: verl's whole configuration.
        settings: the run's clipx node, complete.
    """
    paths = {}
    log = own_log_path(config)
    if log is not None:
        paths["log"] = str(log)
        paths["record"] = str(record_path(log))
    elif logs_to_file(config):
        paths["verl's log"] = str(log_path(config))
    if settings.trace is not None:
        paths["traces"] = str(settings.trace.folder)
    return paths


def describe_traces(resolved: Resolved) -> str | None:
    """Return which prompts are traced, and the most that each traced rollout batch writes; None without a trace."""
    trace = resolved.clipx.trace
    batch = resolved.record.batch
    if trace is None:
        return None
    which = f"{100 * trace.fraction:g} % of the prompts, in one of {trace.every} rollout batches"
    factors = [batch.prompts, batch.responses, find_response_limits(resolved.record).response]
    if not all(map(is_number, factors)):
        return which
    tokens = math.prod(factors) * (batch.epochs or 1) * max(len(resolved.record.schedule.passes), 1)
    costs = read_costs()
    size = tokens * trace.fraction * costs["trace_bytes_a_token"] / 1e6
    return f"{which}; at most about {size:.2g} MB each, if all responses are full ({costs['source']})"


def run_verls_check(config: DictConfig) -> list[str]:
    """Return the objection of verl's own check of a configuration; empty if it has none.

    The check runs without those of its parts that would load the critic's tokenizer or ask vLLM.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    if trainer_of(read(config)).kind == FULLY_ASYNC:
        # verl's fully asynchronous main does not call it.
        return []
    config = config.copy()
    uncounted_keys = counted_nothing(config)
    with open_dict(config):
        # A number that was not counted is 0, and verl would divide by it. 1 divides every number.
        for key in uncounted_keys:
            OmegaConf.update(config, key, 1)
        # verl would load the critic's tokenizer from the hub, and ask an installed vLLM for its LoRA ranks.
        OmegaConf.update(config, CRITIC_MODEL, None)
        OmegaConf.update(config, LORA_RANK_BEFORE, 0)
        if OmegaConf.select(config, LORA_RANK):
            OmegaConf.update(config, LORA_RANK, 0)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            validate_config(config, need_reference_policy(config), need_critic(config))
        except Exception as error:
            return [f"verl refuses it: {error}"]
    return []


def end_with(description: Description) -> NoReturn:
    """Hand an answer over, and end this process.

    Where it prints the answer, the exit code says whether something stops the run. Where it writes to a file, a script
    goes on in any case.
    """
    atexit.unregister(exit_without_configuration)
    if prints_answer():
        print("\n".join(redact(description.text)), flush=True)
        raise SystemExit(1 if description.stops else 0)
    with open(os.environ[EXPLAIN], "a") as file:
        file.write(json.dumps({**dataclasses.asdict(description), "text": description.text}) + "\n")
    raise SystemExit(0)


def answer_and_end(config: DictConfig) -> NoReturn:
    """Run in place of the functions with which verl starts training: answer, and end this process."""
    description = answer(config, **said_by_command_line())
    if HydraConfig.initialized():
        description = with_command_line(description)
    end_with(description)


def with_command_line(description: Description) -> Description:
    """Return a description with what Hydra knows of the command line that began this run."""
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        # Without arguments: each run of a sweep has its own, and `clipx explain` would miss those that were typed.
        return dataclasses.replace(description, loss=f"only the first run of a sweep is explained: {description.loss}")
    return dataclasses.replace(
        description,
        arguments=[*hydra.overrides.task, *hydra.overrides.hydra],
        without_plugin=describe_without_plugin(hydra.overrides.task) if description.of_the_plugin else None,
    )


def skip_ray_init(*_: Any) -> None:
    """Replace ray.init, and start nothing: a main may start Ray before it calls verl with a configuration.

    A process that then ends without a configuration of verl's says so, if it prints its answer. Where answers go to a
    file, `clipx explain` says that there is none.
    """
    if prints_answer():
        # A main may call ray.init more than once, and the message is printed once.
        atexit.unregister(exit_without_configuration)
        atexit.register(exit_without_configuration)


def prints_answer() -> bool:
    """Return whether this process prints its answer, instead of appending it to the file that `EXPLAIN` names."""
    return os.environ[EXPLAIN] == "1"


def exit_without_configuration() -> None:
    """Say that a process that started Ray has shown no configuration, and end it with exit code 1."""
    description = describe_missing_configuration("The program started Ray and ended")
    print("\n".join(description.text), flush=True)
    # At this point an exception would no longer set the exit code.
    os._exit(1)


def end_where_ray_is_used(*_: Any) -> NoReturn:
    """Replace the start that Ray makes at its first use. Answer with the configuration that Hydra passed to the main.

    A main of the user's own may give its configuration to a task of its own, instead of to a function of verl's that
    is hooked. Without a configuration of verl's, the answer is that there is none.
    """
    if _main_configuration is not None and OmegaConf.select(_main_configuration, ROLLOUT) is not None:
        answer_and_end(_main_configuration)
    end_with(describe_missing_configuration("The program would use Ray here"))


def describe_missing_configuration(where: str) -> Description:
    """Return the answer of a process that has shown no configuration.

    Args:
        where: a clause that says what the process had done by then.
    """
    why = f"{where}, and verl's trainer has shown no configuration."
    return Description("no configuration seen", stops=[why])


def run_hydra(wrapped: Callable[..., None], _: None, positional: tuple, keyword_arguments: dict[str, Any]) -> None:
    """Wrap Hydra's `_run_hydra`: Hydra writes nothing, and if the configuration does not compose, this answers.

    Args:
        wrapped: `_run_hydra`.
        positional: empty, because hydra.main passes all arguments by name.
        keyword_arguments: the arguments of `_run_hydra`.
    """
    # With this variable Hydra raises its errors. Otherwise it would print them itself.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    args = keyword_arguments["args"]
    task = keyword_arguments["task_function"]
    given = [*args.overrides]

    # Hydra looks up the file of the task function; it finds that of `task` because of functools.wraps.
    @functools.wraps(task)
    def remember_configuration(config: DictConfig) -> Any:
        global _main_configuration
        _main_configuration = config
        return task(config)

    args.overrides += [*NOTHING_WRITTEN, f"hydra.sweep.dir={tempfile.gettempdir()}"]
    try:
        wrapped(*positional, **{**keyword_arguments, "task_function": remember_configuration})
    except (HydraException, OmegaConfBaseException) as error:
        reason = explain_composition_error(error)
        end_with(Description("a configuration that does not compose", stops=[reason], arguments=given))


def explain_composition_error(error: Exception) -> str:
    """Return the part of Hydra's or OmegaConf's message that says why a configuration does not compose.

    If an option of a group is unknown, the known options follow in a line.
    """
    message = str(error)
    if isinstance(error, OverrideParseException):
        return explain_override_error(error.override or "", message)
    # After a blank line Hydra lists the known options and its search path, one in each line.
    reason, _, lists = message.partition("\n\n")
    options, _, _ = lists.partition("\nConfig search path:")
    if options.startswith("Available options"):
        heading, *names = options.splitlines()
        reason += f"\n{heading} {', '.join(name.strip() for name in names)}"
    return reason


def explain_override_error(override: str, message: str) -> str:
    """Return why Hydra cannot read a word of the command line as an override.

    Args:
        override: the word.
        message: Hydra's message.
    """
    if not override.strip():
        return "There is a blank where an override should be. A blank after a backslash ends the command: remove it."
    first, *others = message.splitlines()
    # In some messages the first line only repeats the override.
    reason = others[0] if first.startswith("Error parsing override") else first
    return f"{override} is not an override that Hydra can read: {reason}"
