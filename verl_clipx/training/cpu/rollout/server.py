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
    """Generates for one replica, receives its weights, and can be paused.

    All methods and all decoding steps run on the actor's event loop, so no two of them overlap.

    Args:
        config: verl's configuration of the rollout.
        model_config: verl's configuration of the model.
        replica_rank: the number of the replica, from 0.

    Raises:
        ValueError: as `check_rollout_config`.
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
        # What `generate` waits for, by request.
        self._completions: dict[Request, asyncio.Future] = {}
        # The names that the current weight update has brought; empty while none is under way.
        self._received: set[str] = set()
        self._has_weights = False
        self._is_asleep = False
        # The traceback of what ended the decoding or left the weights in an unknown state; None as long as all is well.
        self._failure: str | None = None
        # Set while there are requests and nothing suspends the decoding.
        self._may_decode = asyncio.Event()
        # Set while requests are admitted. While it is not, `_rejects_requests` says what becomes of new ones.
        self._admits_requests = asyncio.Event()
        self._admits_requests.set()
        self._rejects_requests = False

    async def launch_server(self) -> None:
        """Build the model, and start the task that decodes submitted requests.

        Under ``load_format=dummy`` the model has random weights, and `generate` raises RuntimeError until the trainer's
        first update of the weights is complete.
        """
        loads_checkpoint = self.config.load_format != "dummy"
        self._model = build_model(self.model_config, PRECISIONS[self.config.dtype], load_weights=loads_checkpoint)
        self._has_weights = loads_checkpoint
        self._generator = Generator(
            self._model,
            vocabulary_size=len(self.model_config.tokenizer),
            max_rows=self.config.max_num_seqs,
            max_prefill_tokens=self.config.max_num_batched_tokens,
            log_prob_mode=self.config.logprobs_mode,
        )
        # Kept, because asyncio may discard a task that nothing refers to.
        self._decoding_task = asyncio.create_task(self._decode_requests())

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
        """Continue a prompt. Wait while generation is paused, unless the server then rejects requests.

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
            RuntimeError: the server has no weights yet; or it has failed, and the message contains the original
                traceback.
        """
        if image_data or video_data or audio_data:
            raise ValueError(
                "the CPU rollout generates only from text, but the request contains image, video or audio data"
            )
        prompt_ids = list(normalize_token_ids(prompt_ids))
        longest_response = self._max_model_len - len(prompt_ids)
        if not prompt_ids or longest_response < 1:
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
            room_in_context=longest_response,
            end_token_ids=self._end_token_ids,
            ignore_eos=self.config.ignore_eos,
        )
        while self._failure is None and not self._admits_requests.is_set():
            if self._rejects_requests:
                return self._rejected_output()
            await self._admits_requests.wait()
        if self._failure is not None:
            raise self._failure_error()
        if not self._has_weights:
            raise RuntimeError(f"{server_name(self.replica_rank)} has no weights yet. The trainer must send them first")
        request = Request(request_id, prompt_ids, parameters, self._seed(request_id, parameters.seed))
        completion = asyncio.get_running_loop().create_future()
        self._completions[request] = completion
        self._generator.submit(request)
        self._continue()
        await completion
        return self._output(request, with_log_probs=bool(sampling_params.get("logprobs")))

    def _seed(self, request_id: str, requested: int | None) -> int:
        """Return the seed of a request's random numbers; `requested` is the one that the request has, if any."""
        self._requests_seen += 1
        if requested is not None:
            return derive_seed("request", requested)
        if self.config.full_determinism:
            # Which replica serves a request, and when, depends on timing; its name does not.
            return derive_seed("request id", self.config.seed, request_id)
        return derive_seed("arrival", self.config.seed, self.replica_rank, self._requests_seen)

    def _output(self, request: Request, *, with_log_probs: bool) -> TokenOutput:
        """Return what a request has generated, to its end or until it was aborted."""
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.log_probs if with_log_probs else None,
            stop_reason="completed" if request.finished else "aborted",
            extra_fields=self._extra_fields(),
        )

    def _rejected_output(self) -> TokenOutput:
        """Return the output of a request that was not admitted."""
        return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=self._extra_fields())

    def _extra_fields(self) -> dict[str, int | None]:
        """Return what verl reads of a response beside its tokens."""
        # No cache is kept after its request, so no prompt token is ever taken from a cache.
        return {"global_steps": self.global_steps, "num_cached_tokens": 0}

    async def _decode_requests(self) -> None:
        """Decode while `_may_decode` is set. At the first exception, fail all waiting requests and end."""
        try:
            while True:
                await self._may_decode.wait()
                for request in self._generator.step():
                    self._wake_caller(request)
                if not self._generator.pending:
                    self._may_decode.clear()
                # Let new requests and control calls run between two tokens.
                await asyncio.sleep(0)
        except Exception:
            # Without this handler, the agent loops would wait forever for responses that nobody computes.
            self._fail()

    def _wake_caller(self, request: Request) -> None:
        """Let the call of `generate` that waits for a request return."""
        completion = self._completions.pop(request, None)
        if completion is not None and not completion.done():
            completion.set_result(None)

    def _fail(self) -> None:
        """Keep the traceback of the exception that is being handled, and end all requests with it."""
        self._failure = traceback.format_exc()
        self._may_decode.clear()
        logger.error("%s failed:\n%s", server_name(self.replica_rank), self._failure)
        self._generator.abort()
        for completion in self._completions.values():
            if not completion.done():
                completion.set_exception(self._failure_error())
        self._completions.clear()
        # Requests that wait to be admitted go on, and raise the failure.
        self._admits_requests.set()

    def _failure_error(self) -> RuntimeError:
        """Return the error of a request to a server that has failed."""
        return RuntimeError(f"{server_name(self.replica_rank)} has failed:\n{self._failure}")

    # Flow control

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with its tokens so far, and admit no others until `resume_generation`.

        Args:
            reject_request: whether requests that arrive until then return as aborted, instead of waiting.

        Returns:
            The number of the ended requests, and their names.
        """
        self._admits_requests.clear()
        self._rejects_requests = reject_request
        aborted = self._generator.abort()
        for request in aborted:
            self._wake_caller(request)
        return {"aborted_count": len(aborted), "request_ids": [request.request_id for request in aborted]}

    async def resume_generation(self) -> None:
        """Admit requests again, waiting ones first."""
        self._rejects_requests = False
        self._admits_requests.set()

    async def sleep(self) -> None:
        """Suspend decoding and free the cache, if ``rollout.free_cache_engine`` is set."""
        if self.config.free_cache_engine:
            self._is_asleep = True
            self._generator.forget_cache()
            self._may_decode.clear()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Resume decoding, unless ``tags`` names the weights alone: these are about to be replaced."""
        if tags is None or "kv_cache" in tags:
            self._is_asleep = False
            self._continue()

    async def clear_kv_cache(self) -> None:
        """Drop the key-value cache. Requests that are being decoded are computed anew."""
        self._generator.forget_cache()

    async def release_kv_cache(self) -> None:
        """Suspend decoding and free the cache, keeping the weights."""
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        """Counterpart of `release_kv_cache`."""
        await self.wake_up()

    def _continue(self) -> None:
        """Let the decoding go on if there are requests and nothing suspends it."""
        if self._generator.pending and not self._is_asleep and not self._received:
            self._may_decode.set()

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
            After any of these, the server has failed, because its weights are those of no version.
        """
        self._may_decode.clear()
        try:
            copy_weights(self._model, message)
            self._received.update(message)
            if not last:
                return
            missing = missing_weights(self._model, self._received)
            if missing:
                raise RuntimeError(f"the trainer's weight update lacks {', '.join(missing)}")
        except Exception:
            self._fail()
            raise
        self._received.clear()
        self._generator.forget_cache()
        self._has_weights = True
        if global_steps is not None:
            self.global_steps = global_steps
        self._continue()

    # Profiling. verl calls these methods of every rollout, and here is no engine to profile.

    async def start_profile(self, **kwargs) -> None:
        """Do nothing."""

    async def stop_profile(self) -> None:
        """Do nothing."""


def check_rollout_config(config: RolloutConfig) -> None:
    """Raise ValueError if a setting is one that the CPU rollout does not implement."""
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
    tokens = list(generation) if isinstance(generation, list | tuple) else [generation]
    tokens.append(model_config.tokenizer.eos_token_id)
    return frozenset(token for token in tokens if token is not None)


def build_model(model_config: HFModelConfig, dtype: torch.dtype, *, load_weights: bool) -> PreTrainedModel:
    """Build the policy in evaluation mode, with its checkpoint's weights or random ones."""
    options = dict(dtype=dtype, attn_implementation="sdpa", trust_remote_code=model_config.trust_remote_code)
    if load_weights:
        model = AutoModelForCausalLM.from_pretrained(model_config.local_path, config=model_config.hf_config, **options)
    else:
        model = AutoModelForCausalLM.from_config(model_config.hf_config, **options)
    return model.eval().requires_grad_(False)
