"""Packed linear layers give what `F.linear` gives, follow their weights, and stay out of training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spec_train.packed as packed_module
from spec_train.batch import FeatureSpec
from spec_train.packed import PackedLinear, PackedWeight, pack_linears, plain_linears
from spec_train.target import TargetModel
from tests.tiny import tiny_model

needs_packing = pytest.mark.skipif(not packed_module._SUPPORTED, reason="this CPU's weights stay plain")


def frozen(bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    pack_linears(layer)
    return layer


def same(layer, x):
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_layer(bias):
    layer = frozen(bias)
    assert list(layer.state_dict()) == list(nn.Linear(1, 1, bias=bias).state_dict())
    for shape in ((48,), (1, 48), (2, 48), (1, 3, 48), (2, 4, 48), (3, 5, 7, 48), (0, 48)):
        same(layer, torch.randn(shape))
    same(layer, torch.randn(48, 6).T)  # not contiguous
    assert layer.packed.packed is not None


@needs_packing
def test_a_changed_weight_is_packed_anew():
    layer, x = frozen(), torch.randn(4, 48)
    same(layer, x)
    layer.weight.mul_(2)
    same(layer, x)
    layer.load_state_dict({name: value + 1 for name, value in layer.state_dict().items()})
    same(layer, x)
    layer.weight = nn.Parameter(torch.randn(80, 48), requires_grad=False)
    same(layer, x)
    layer.to(torch.float64)
    same(layer, x.double())


@needs_packing
def test_training_sees_the_plain_layer():
    layer, x = frozen(), torch.randn(4, 48, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, -1))
    layer.requires_grad_(True)
    with torch.no_grad():
        layer(x)
    layer.requires_grad_(False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.no_grad(), plain_linears():
        layer(x)
    assert layer.packed.packed is None


@needs_packing
def test_copies_and_room(monkeypatch):
    layer, x = frozen(), torch.randn(4, 48)
    same(layer, x)
    twin = copy.deepcopy(layer)
    assert isinstance(twin, PackedLinear) and twin.packed.packed is None
    twin.weight.add_(1)
    same(twin, x)
    same(layer, x)
    lent = PackedWeight()
    with torch.inference_mode():
        lent.linear(x, layer.weight.detach())
    assert lent.packed is layer.packed.packed and lent.bytes == 0
    monkeypatch.setattr(packed_module, "MOST_BYTES", 0)
    late = frozen()
    same(late, x)
    assert late.packed.packed is None


@needs_packing
@pytest.mark.parametrize("kind", ["freed", "lent", "transposed"])
def test_another_weight_at_the_same_address_is_packed_anew(kind):
    """A temporary in another dtype is packed and freed, and the next one takes its place, for the same owner or for
    another one; a square weight is looked at from the other side."""
    owners, x = [PackedWeight()], torch.randn(4, 64)
    reused, addresses = 0, set()
    for seed in range(40):
        half = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).half()
        weight = half.to(torch.float32)  # as a head that is borrowed in another dtype
        reused += weight.data_ptr() in addresses
        addresses.add(weight.data_ptr())
        packed = owners[-1]
        with torch.no_grad():
            torch.testing.assert_close(packed.linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
            if kind == "transposed":
                torch.testing.assert_close(packed.linear(x, weight.T), x @ weight, atol=1e-4, rtol=1e-4)
        del weight
        if kind == "lent":
            owners.append(PackedWeight())
    assert reused > 20  # else this shows nothing


@needs_packing
def test_a_target_steps_as_with_plain_layers(tmp_path):
    target = TargetModel.load(str(tiny_model("llama", tmp_path)))
    spec, prompts = FeatureSpec((1,), True), [[5, 6, 7, 8], [9, 10]]

    def step():
        cache = target.new_cache(12)
        target.prefill(prompts, cache, spec)
        ids, position = torch.arange(10).view(2, 5), torch.tensor([[4], [2]]) + torch.arange(5)
        hidden, features = target.step(ids, position, cache, spec)
        return target.logits(hidden), features.aux_hidden

    with torch.inference_mode():
        ours = step()
        with plain_linears():
            plain = step()
    assert all(m.packed.packed is not None for m in target.model.modules() if isinstance(m, PackedLinear))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
