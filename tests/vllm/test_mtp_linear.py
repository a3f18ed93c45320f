"""A Qwen3.5 target with linear attention and its MTP layer in real vLLM, whose kernels take bfloat16 alone.

So that text can be compared all the same, the target has learnt an answer to each prompt by heart: it is sure of every
token, but only as long as its running state has read the prompt and the answer, and none of the refused drafts.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spec_train.decoding.engine import plain_decode, speculative_decode
from spec_train.decoding.sampling import Sampling
from spec_train.serving.export import export
from spec_train.serving.golden import make_golden
from spec_train.serving.verify import comparison_dtype, verify_export
from spec_train.speculators import load_speculator
from spec_train.speculators.mtp import Mtp, MtpOptions
from spec_train.target import TargetModel
from tests.mtp_targets import mtp_target
from tests.parity.test_mtp import fit

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen3.5 needs a torchvision that fits torch"
    ),
]
K, NEW_TOKENS = 3, 32
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in (5, 9, 13, 17, 24)]
ANSWERS = [[DRAW.randrange(4, 24) for _ in range(NEW_TOKENS)] for _ in PROMPTS]  # few tokens, again and again


def learnt_target(folder: Path) -> Path:
    """A target that has learnt `ANSWERS` by heart, in bfloat16."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    place = mtp_target("qwen3_5", folder, layer_types=kinds, **sizes)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    answer = torch.tensor(
        [[i >= len(p) and i < len(t) for i in range(width)] for p, t in zip(PROMPTS, texts, strict=True)]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.tensor(9.0)
    while loss > 1e-3:
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits[answer[:, 1:]], ids[:, 1:][answer[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learnt = dict(model.state_dict())
    tensors = {name: learnt.get(name, value) for name, value in load_file(place / "model.safetensors").items()}
    rounded = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(rounded, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    # Text alone has the same positions in all three parts of M-RoPE, and drafting beside it crashes vLLM's CPU build.
    del config["rope_parameters"]["mrope_section"]
    (place / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return place


def test_vllm_drafts_what_we_draft(tmp_path: Path) -> None:
    place = learnt_target(tmp_path)
    assert comparison_dtype(place) == "bfloat16"
    exact = TargetModel.load(str(place))
    head = Mtp.from_recipe(MtpOptions(type="mtp", init="target_head"), exact, torch.arange(320), seed=0)
    fit(exact, head, steps=8, prompts=PROMPTS)  # right often, and wrong often enough
    golden = make_golden(head, exact, PROMPTS[0])
    exported = export(
        head.serving(), tmp_path / "head", format="stitched", target_id=exact.name, num_draft_tokens=K, golden=golden,
        provenance={},
    )  # fmt: skip
    target = TargetModel.load(str(place), dtype=torch.bfloat16)
    plain = plain_decode(target, PROMPTS, sampling=Sampling(), max_new_tokens=NEW_TOKENS, batch_size=5)
    assert [request.output_ids for request in plain.requests] == ANSWERS
    trace = speculative_decode(
        target, load_speculator(exported, target), PROMPTS, num_draft_tokens=K, sampling=Sampling(),
        max_new_tokens=NEW_TOKENS, batch_size=5,
    )  # fmt: skip
    cycles = [cycle for request in trace.requests for cycle in request.cycles]
    assert {0, K} <= {cycle.accepted for cycle in cycles}
    report = verify_export(
        exported, place, prompts=PROMPTS, max_new_tokens=NEW_TOKENS, num_draft_tokens=K, expected_trace=trace,
        vllm="require",
    )  # fmt: skip
    assert report.problems == []
    run = report.vllm
    assert run is not None
    assert run.dtype == "bfloat16"
    assert (run.outputs_equal_baseline, run.outputs_equal_ours, run.near_ties) == (len(PROMPTS), len(PROMPTS), 0)
    assert run.cycles_equal >= 0.9 * run.cycles_compared > 0
