"""The rollout server: an asynchronous Ray actor that holds the policy and generates for verl's agent loops."""

import asyncio
import logging
import os
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_clipx.run.keys import CONTEXT, ROLLOUT
from verl_clipx.training.cpu.rollout.generator import Generator, Request
from verl_clipx.training.cpu.rollout.parameters import read_sampling_parameters
from verl_clipx.training.cpu.rollout.sampling import LOG_PROB_MODES, derive_seed
from verl_clipx.training.cpu.rollout.weights import copy_weights, missing_weights

PRECISIONS = {"float32": torch.float32, "fp32": torch.float32, "float64": torch.float64}

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's Ray actor. Each replica has one server, on the node of its first worker."""
    return f"cpu_server_{replica_rank}_0"


class CPUServer:
    """Handles generation, weights and flow control of one replica, numbered from 0.

    All methods and all decoding steps run on the actor's event loop, so no two of them overlap.
    """

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, replica_rank: int):
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        check_rollout_config(self.config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.replica_rank = replica_rank
        torch.set_num_threads(int(self.config.engine_kwargs.get("cpu", {}).get("num_threads", 1)))

        self.global_steps: int | None = None
        self._end_token_ids = end_token_ids(self.model_config)
        self._max_model_len = self.config.max_model_len or get_max_position_embeddings(self.model_config.hf_config)
        self._requests_seen = 0
        self._answers: dict[Request, asyncio.Future] = {}
        self._received: set[str] = set()
        self._has_weights = False
        self._asleep = False
        self._rejecting = False
        self._failure: str | None = None
        self._work = asyncio.Event()
        self._admitting = asyncio.Event()
        self._admitting.set()

    async def launch_server(self) -> None:
        """Build the model and start generating. With ``load_format=dummy`` the first update sets the weights."""
        dummy = self.config.load_format == "dummy"
        self._model = build_model(self.model_config, PRECISIONS[self.config.dtype], load_weights=not dummy)
        self._has_weights = not dummy
        self._generator = Generator(
            self._model,
            vocabulary_size=len(self.model_config.tokenizer),
            max_rows=self.config.max_num_seqs,
            max_prefill_tokens=self.config.max_num_batched_tokens,
            log_prob_mode=self.config.logprobs_mode,
        )
        self._loop = asyncio.create_task(self._generate_forever())

    # Generation

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt. Waits while generation is paused, unless the server rejects late requests.

        Args:
            prompt_ids: token ids of the prompt, at least one.
            sampling_params: see `parameters.ACCEPTED_KEYS`; ``logprobs`` is a flag.
            request_id: name of the request; it also determines the seed under ``rollout.full_determinism``.
            image_data, video_data, audio_data, mm_processor_kwargs: must be empty, since the server is text only.
            priority: ignored; requests are served in order of arrival.

        Returns:
            Tokens (including any stop token), their log-probabilities if requested, the stop reason (``completed`` or
            ``aborted``) and, in ``extra_fields``, the version of the weights.

        Raises:
            ValueError: a parameter is not supported, or the prompt leaves no room in the context.
            RuntimeError: the server has no weights yet, or has failed; the message holds the original traceback.
        """
        if image_data or video_data or audio_data:
            raise ValueError(
                "the CPU rollout generates only from text, but the request contains image, video or audio data"
            )
        prompt_ids = list(normalize_token_ids(prompt_ids))
        room = self._max_model_len - len(prompt_ids)
        if not prompt_ids or room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens: must be between 1 and {self._max_model_len - 1} "
                f"({CONTEXT}, else the model's max_position_embeddings)"
            )
        parameters = read_sampling_parameters(
            sampling_params,
            default_max_tokens=min(
                self.config.response_length,
                self.config.prompt_length + self.config.response_length - len(prompt_ids),
            ),
            longest=room,
            end_token_ids=self._end_token_ids,
            ignore_eos=self.config.ignore_eos,
        )
        while not self._admitting.is_set():
            if self._rejecting:
                return self._output(None, with_log_probs=False)
            await self._admitting.wait()
        if not self._has_weights:
            raise RuntimeError(f"{server_name(self.replica_rank)} has no weights yet. The trainer must send them first")
        if self._failure:
            raise RuntimeError(f"{server_name(self.replica_rank)} has failed:\n{self._failure}")
        request = Request(request_id, prompt_ids, parameters, self._seed(request_id, parameters.seed))
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        self._generator.submit(request)
        self._continue()
        await answer
        return self._output(request, with_log_probs=bool(sampling_params.get("logprobs")))

    def _seed(self, request_id: str, requested: int | None) -> int:
        self._requests_seen += 1
        if requested is not None:
            return derive_seed("request", requested)
        if self.config.full_determinism:
            # Which replica serves a request, and when, depends on timing; its name does not.
            return derive_seed("request id", self.config.seed, request_id)
        return derive_seed("arrival", self.config.seed, self.replica_rank, self._requests_seen)

    def _output(self, request: Request | None, *, with_log_probs: bool) -> TokenOutput:
        return TokenOutput(
            token_ids=request.token_ids if request else [],
            log_probs=request.log_probs if request and with_log_probs else None,
            stop_reason="completed" if request and request.finished else "aborted",
            # No cache outlives its request, so a prompt token is never found in one.
            extra_fields={"global_steps": self.global_steps, "num_cached_tokens": 0},
        )

    async def _generate_forever(self) -> None:
        try:
            while True:
                await self._work.wait()
                for request in self._generator.step():
                    self._answer(request)
                if not self._generator.pending:
                    self._work.clear()
                # Let new requests and control calls run between two tokens.
                await asyncio.sleep(0)
        except Exception as error:
            # Without this, the agent loops would wait forever for answers that nobody computes.
            self._failure = traceback.format_exc()
            logger.error("%s failed:\n%s", server_name(self.replica_rank), self._failure)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(RuntimeError(f"the CPU rollout failed: {error}\n{self._failure}"))
            self._answers.clear()

    def _answer(self, request: Request) -> None:
        answer = self._answers.pop(request, None)
        if answer is not None and not answer.done():
            answer.set_result(None)

    # Flow control

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with its tokens so far, and admit no others until `resume_generation`.

        Args:
            reject_request: answer requests that arrive meanwhile as aborted instead of letting them wait.
        """
        self._admitting.clear()
        self._rejecting = reject_request
        aborted = self._generator.abort()
        for request in aborted:
            self._answer(request)
        return {"aborted_count": len(aborted), "request_ids": [request.request_id for request in aborted]}

    async def resume_generation(self) -> None:
        """Admit requests again, waiting ones first."""
        self._rejecting = False
        self._admitting.set()

    async def sleep(self) -> None:
        """Suspend decoding and free the cache, if ``rollout.free_cache_engine`` is set."""
        if self.config.free_cache_engine:
            self._asleep = True
            self._generator.forget_cache()
            self._work.clear()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Resume decoding. Waking only ``weights`` does not resume it, since they are about to be replaced."""
        if tags is None or "kv_cache" in tags:
            self._asleep = False
            self._continue()

    async def clear_kv_cache(self) -> None:
        """Drop cached states; requests in flight are recomputed."""
        self._generator.forget_cache()

    async def release_kv_cache(self) -> None:
        """Suspend decoding and free the cache, keeping the weights."""
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        """Counterpart of `release_kv_cache`."""
        await self.wake_up()

    def _continue(self) -> None:
        if self._generator.pending and not self._asleep and not self._received:
            self._work.set()

    # Weights

    async def load_weights(self, message: Mapping[str, np.ndarray], *, last: bool, global_steps: int | None) -> None:
        """Write new weights. Decoding is suspended from the first message of an update to its last.

        Args:
            message: name to float32 array, from `weights.pack_weights`.
            last: whether the update is complete with this message.
            global_steps: version of the weights, reported with every response from then on.

        Raises:
            KeyError, ValueError: the model has no weight of that name or shape.
            RuntimeError: the update is complete, but some weight is missing from it.
        """
        self._work.clear()
        copy_weights(self._model, message)
        self._received.update(message)
        if not last:
            return
        missing = missing_weights(self._model, self._received)
        self._received.clear()
        if missing:
            raise RuntimeError(f"the trainer's weight update lacks {', '.join(missing)}")
        self._generator.forget_cache()
        self._has_weights = True
        if global_steps is not None:
            self.global_steps = global_steps
        self._continue()

    # Profiling: verl calls these on every rollout; there is no engine to profile here.

    async def start_profile(self, **kwargs) -> None:
        """No effect."""

    async def stop_profile(self) -> None:
        """No effect."""


def check_rollout_config(config: RolloutConfig) -> None:
    """Reject settings that the CPU rollout does not implement."""
    accepted = {
        "dtype": tuple(PRECISIONS),
        "logprobs_mode": LOG_PROB_MODES,
        "quantization": (None,),
        "enable_rollout_routing_replay": (False,),
    }
    for key, values in accepted.items():
        value = getattr(config, key)
        if value not in values:
            allowed = " or ".join(map(str, values))
            raise ValueError(f"{ROLLOUT}.{key}={value}: the CPU rollout needs {allowed}")


def end_token_ids(model_config: HFModelConfig) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's and those of the model's generation configuration."""
    generation = getattr(model_config.generation_config, "eos_token_id", None)
    found = generation if isinstance(generation, list | tuple) else [generation]
    return frozenset(token for token in (*found, model_config.tokenizer.eos_token_id) if token is not None)


def build_model(model_config: HFModelConfig, dtype: torch.dtype, *, load_weights: bool) -> PreTrainedModel:
    """Build the policy in evaluation mode, with its checkpoint's weights or random ones."""
    options = dict(dtype=dtype, attn_implementation="sdpa", trust_remote_code=model_config.trust_remote_code)
    if load_weights:
        model = AutoModelForCausalLM.from_pretrained(model_config.local_path, config=model_config.hf_config, **options)
    else:
        model = AutoModelForCausalLM.from_config(model_config.hf_config, **options)
    return model.eval().requires_grad_(False)
