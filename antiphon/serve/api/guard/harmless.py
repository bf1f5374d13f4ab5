"""Parameters of other servers that this one, or one of its endpoints, does not have: which of their values it accepts.

Clients send defaults along: `tools: []`, `best_of: 1`, `use_beam_search: false`. Such a value asks for what happens
anyway, so it is accepted and taken out of the request. Any other value cannot be obeyed and is refused, with the values
that are accepted and the reason. Null means absent, always.

The names are those of OpenAI's and Anthropic's APIs and of vLLM's and SGLang's servers. A name that is a field of the
request's model is obeyed, whatever this table says of it. Rejected: ignoring what is not known; a client would never
learn that its request was not obeyed.
"""

import json
from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Harmless:
    """The values that change nothing, and why every other one is refused."""

    values: tuple[object, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        """Whether `value` is null or one of `values`; 1 and 1.0 are the same, 1 and true are not."""
        return value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values
        )

    @property
    def accepted(self) -> str:
        """The accepted values for people: ``null, "auto" or "default"``."""
        *others, last = [json.dumps(value) for value in (None, *self.values)]
        return f"{', '.join(others)} or {last}" if others else last


_ONLY_TEXT = "this server reads and writes text only"
_NO_TOOLS = "this server runs no tools itself"
_ONLY_CHAT = "only /v1/chat/completions has it"
_GRAMMAR = "use response_format"
_CACHE = "prefixes are cached by their content alone"
_TRANSFER = "requests cannot carry a cache with them"
_REPORT = "this server does not report it"
_CUSTOM = "requests cannot bring parameters of their own"
_ID = "the server gives ids"

HARMLESS: dict[str, Harmless] = {
    # OpenAI
    "audio": Harmless((), _ONLY_TEXT),
    "background": Harmless((False,), "answers are not made in the background"),
    "context_management": Harmless(([],), "what is sent is what is read"),
    "conversation": Harmless((), "conversations are not kept, but answers of /v1/responses are"),
    "function_call": Harmless(("none", "auto"), "on /v1/chat/completions it is called tool_choice"),
    "functions": Harmless(([],), "on /v1/chat/completions they are called tools"),
    "max_completion_tokens": Harmless((), "on /v1/completions it is called max_tokens"),
    "modalities": Harmless((["text"],), _ONLY_TEXT),
    "moderation": Harmless((), "moderation is not supported"),
    "parallel_tool_calls": Harmless((True, False), _ONLY_CHAT),
    "prediction": Harmless((), "predicted outputs are not supported"),
    "prompt": Harmless((), "only /v1/completions has it, and prompts are not stored"),
    # How long a prefix stays is up to the memory here; a retention is the most that a client allows.
    "prompt_cache_options": Harmless(({}, {"mode": "implicit"}, {"mode": "implicit", "ttl": "30m"}), _CACHE),
    "prompt_cache_retention": Harmless(("in_memory", "in-memory", "24h"), _CACHE),
    "reasoning_effort": Harmless(("none",), _ONLY_CHAT),
    "service_tier": Harmless(("auto", "default"), "there is only one tier"),
    "store": Harmless((False,), "requests are not stored"),
    "suffix": Harmless(("",), "insertion into text is not supported"),
    "tool_choice": Harmless(("none", "auto"), _ONLY_CHAT),
    "tools": Harmless(([],), _ONLY_CHAT),
    "top_logprobs": Harmless((), "on /v1/completions, logprobs is the number of alternatives"),
    "verbosity": Harmless(("medium",), "say it in the prompt"),
    "web_search_options": Harmless((), "web search is not supported"),
    # Anthropic
    "compaction": Harmless((), "conversations are not summarized"),
    "container": Harmless((), _NO_TOOLS),
    "diagnostics": Harmless((), _REPORT),
    "fallbacks": Harmless(([], "default"), "there is only one model"),
    # vLLM and SGLang: sampling
    "custom_logit_processor": Harmless((), "code from requests is not run"),
    "early_stopping": Harmless((False,), "beam search is not supported"),
    "length_penalty": Harmless((1.0,), "beam search is not supported"),
    "logits_processors": Harmless(([],), "code from requests is not run"),
    "repetition_detection": Harmless((), "use repetition_penalty or frequency_penalty"),
    "thinking": Harmless((), "on /v1/chat/completions use chat_template_kwargs"),
    "thinking_token_budget": Harmless((), _ONLY_CHAT),
    "use_beam_search": Harmless((False,), "beam search is not supported"),
    "watermark": Harmless((), "watermarks are not supported"),
    "watermarking": Harmless((False,), "watermarks are not supported"),
    # grammars
    "guided_decoding_backend": Harmless(("auto", "guidance"), "grammars are followed by llguidance"),
    "guided_whitespace_pattern": Harmless((), _GRAMMAR),
    # prompts and text
    "add_generation_prompt": Harmless((), _ONLY_CHAT),
    "chat_template": Harmless((), "the model's own chat template is used"),
    "chat_template_kwargs": Harmless(({},), _ONLY_CHAT),
    "continue_final_message": Harmless((False,), _ONLY_CHAT),
    "documents": Harmless(([],), "put them into a message"),
    "images_config": Harmless(({},), _ONLY_TEXT),
    "include_reasoning": Harmless((True,), _ONLY_CHAT),
    "input_ids": Harmless((), "token ids are a prompt of /v1/completions"),
    "max_dynamic_patch": Harmless((), _ONLY_TEXT),
    "media_io_kwargs": Harmless(({},), _ONLY_TEXT),
    "min_dynamic_patch": Harmless((), _ONLY_TEXT),
    "mm_processor_kwargs": Harmless(({},), _ONLY_TEXT),
    "no_stop_trim": Harmless((False,), "use include_stop_str_in_output"),
    "prompt_embeds": Harmless((), "a prompt is text or token ids"),
    "separate_reasoning": Harmless((True, False), _ONLY_CHAT),
    "spaces_between_special_tokens": Harmless((True, False), "nothing is put between tokens"),
    "stop_regex": Harmless((), "use stop"),
    "stream_interval": Harmless((1,), "every step's tokens are sent at once"),
    "stream_reasoning": Harmless((True,), "reasoning is streamed as it comes"),
    "task": Harmless((), "say it in the prompt"),
    "use_audio_in_video": Harmless((False,), _ONLY_TEXT),
    "video_config": Harmless(({},), _ONLY_TEXT),
    # what an answer reports
    "return_cached_tokens_details": Harmless((False,), "usage has the number of cached tokens"),
    "return_flat_raw_output_top_logprobs": Harmless((False,), _REPORT),
    "return_hidden_states": Harmless((False,), _REPORT),
    "return_meta_info": Harmless((False,), _REPORT),
    "return_prompt_text": Harmless((False,), _REPORT),
    "return_prompt_token_ids": Harmless((False,), "use return_token_ids"),
    "return_routed_experts": Harmless((False,), _REPORT),
    "return_sampling_mask": Harmless((False,), _REPORT),
    "return_spec_tokens_details": Harmless((False,), _REPORT),
    "return_token_offsets": Harmless((False,), "logprobs of /v1/completions have offsets"),
    "routed_experts_prompt_start": Harmless((0,), _REPORT),
    "routed_experts_start_len": Harmless((0,), _REPORT),
    # scheduling and caches
    "cache_salt": Harmless((), _CACHE),
    "custom_labels": Harmless(({},), _CUSTOM),
    "custom_params": Harmless(({},), _CUSTOM),
    "data_parallel_rank": Harmless((), "the server chooses the worker"),
    "ec_transfer_params": Harmless((), _TRANSFER),
    "extra_key": Harmless((), _CACHE),
    "kv_transfer_params": Harmless((), _TRANSFER),
    "lora_path": Harmless((), "adapters are not supported"),
    "rid": Harmless((), _ID),
    "session_id": Harmless((), _CACHE),
    "session_params": Harmless((), _CACHE),
    "vllm_xargs": Harmless(({},), _CUSTOM),
}


def harmless_properties(fields: Set[str]) -> dict[str, dict[str, object]]:
    """What OpenAPI says of the parameters that a request with these `fields` accepts by this table."""
    return {
        name: {"enum": [*entry.values, None], "description": f"Changes nothing. Others are refused: {entry.reason}."}
        for name, entry in HARMLESS.items()
        if name not in fields
    }
