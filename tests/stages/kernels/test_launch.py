"""Compares the fused kernels with torch's own operations: compiled on a GPU,
otherwise in Triton's interpreter (conftest.py)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.kernels import launch, layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if DEVICE == "cpu":
        # The interpreter multiplies rows that there are not, too.
        monkeypatch.setattr(launch, "LINEAR_BLOCK_M", 32)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float16)


def as_images(pixels: Tensor) -> Tensor:
    return pixels.float().permute(0, 3, 1, 2)


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours.float(), theirs.permute(0, 2, 3, 1), atol=1e-2, rtol=1e-2)


def blank_right_of(pixels: Tensor, widths: Tensor) -> Tensor:
    """[N, channels, height, width]"""
    return pixels * (torch.arange(pixels.shape[3], device=DEVICE) < widths[:, None, None, None])


@torch.inference_mode()
def test_a_convolution_has_bias_relu_and_stride_and_takes_bytes() -> None:
    module = nn.Conv2d(3, 24, 3, stride=2, padding=1).to(DEVICE)
    pixels = torch.randint(0, 256, (2, 6, 10, 3), dtype=torch.uint8, device=DEVICE)
    ours, _ = launch.conv2d(layers.Convolution.of(module), pixels)
    agree(ours, F.relu(module(as_images(pixels) * (2 / 255) - 1)))


@torch.inference_mode()
def test_a_convolution_with_an_even_kernel_keeps_the_maps_size_and_is_concatenated_with_a_max_pooling() -> (
    None
):
    module, widths = nn.Conv2d(12, 24, 2).to(DEVICE), torch.tensor([4, 7], device=DEVICE)
    pixels, others = draw(2, 5, 7, 12), draw(2, 5, 7, 24).abs()
    ours, _ = launch.conv2d(layers.Convolution.of(module, padding=(0, 0)), pixels, widths, pooled=others)
    seen, pooled = (F.pad(blank_right_of(as_images(part), widths), (0, 1, 0, 1)) for part in (pixels, others))
    agree(ours[..., :24], F.max_pool2d(pooled, 2, stride=1))
    agree(ours[..., 24:], F.relu(module(seen)))


@torch.inference_mode()
def test_columns_beyond_an_images_width_count_as_zero() -> None:
    widths = torch.tensor([3, 8], device=DEVICE)
    pixels = draw(2, 4, 8, 48)
    full, narrow = (
        nn.Conv2d(48, 24, 3, padding=1).to(DEVICE),
        nn.Conv2d(48, 48, 3, padding=1, groups=48).to(DEVICE),
    )
    blanked = blank_right_of(as_images(pixels), widths)
    agree(launch.conv2d(layers.Convolution.of(full), pixels, widths, relu=False)[0], full(blanked))
    filtered, sums = launch.depthwise_conv2d(
        layers.DepthwiseConvolution.of(narrow), pixels, widths, return_sums=True
    )
    agree(filtered, narrow(blanked))
    assert sums is not None
    torch.testing.assert_close(
        sums.sum(dim=1), blank_right_of(narrow(blanked), widths).sum(dim=(2, 3)), atol=0.1, rtol=1e-2
    )


@pytest.mark.parametrize("kernel", [(7, 7), (1, 7), (3, 3)])
@torch.inference_mode()
def test_a_depthwise_convolution_of_any_kernel_size(kernel: tuple[int, int]) -> None:
    module = nn.Conv2d(40, 40, kernel, padding=(kernel[0] // 2, kernel[1] // 2), groups=40).to(DEVICE)
    pixels = draw(1, 5, 17, 40)
    agree(
        launch.depthwise_conv2d(layers.DepthwiseConvolution.of(module), pixels)[0], module(as_images(pixels))
    )


@torch.inference_mode()
def test_squeeze_and_excitation_uses_the_means_of_a_layers_output() -> None:
    module, first, second = nn.Conv2d(48, 48, 1), nn.Conv2d(48, 6, 1), nn.Conv2d(6, 48, 1)
    for part in (module, first, second):
        part.to(DEVICE)
    made, sums = launch.conv2d(
        layers.Convolution.of(module), draw(2, 9, 30, 48), relu=False, return_sums=True
    )
    gates = launch.squeeze_excitation(
        layers.SqueezeExcitation.of(first, second, 0.2, residual=True), sums, (9, 30)
    )
    means = as_images(made).mean(dim=(2, 3), keepdim=True)
    theirs = (0.2 * second(F.relu(first(means))) + 0.5).clamp(0, 1) + 1
    torch.testing.assert_close(gates, theirs[:, :, 0, 0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 48), (48, 96), (192, 192), (96, 192), (384, 384)])
@torch.inference_mode()
def test_a_pointwise_mlp_is_two_convolutions_with_a_gelu(inputs: int, outputs: int) -> None:
    hidden = 2 * inputs
    first, second = nn.Conv2d(inputs, hidden, 1).to(DEVICE), nn.Conv2d(hidden, outputs, 1).to(DEVICE)
    pixels, gates = draw(2, 3, 5, inputs), torch.rand(2, inputs, device=DEVICE)
    gated = as_images(pixels) * gates[:, :, None, None]
    theirs = second(F.gelu(first(gated)))
    ours = launch.pointwise_mlp(
        layers.PointwiseMlp.of(first, second, residual=inputs == outputs), pixels, gates
    )
    agree(ours, theirs + gated if inputs == outputs else theirs)


@torch.inference_mode()
def test_attention_covers_a_lines_own_steps() -> None:
    lengths, steps, heads = torch.tensor([3, 70, 130], device=DEVICE), 130, 2
    qkv = draw(3, steps, 3 * heads * 15)
    query, key, value = qkv.float().reshape(3, steps, 3, heads, 15).permute(2, 0, 3, 1, 4)
    own = (torch.arange(steps, device=DEVICE) < lengths[:, None])[:, None, None]
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=own, scale=0.3)
    ours = launch.attention(qkv, lengths, heads, 0.3).float()
    torch.testing.assert_close(ours, theirs.transpose(1, 2).flatten(2), atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def test_a_coarser_map_is_upsampled_and_added_to_a_gated_one() -> None:
    pixels, gates, coarser = draw(2, 4, 6, 24), torch.rand(2, 24, device=DEVICE), draw(2, 2, 3, 24)
    gated = as_images(pixels) * gates[:, :, None, None]
    agree(
        launch.upsample_add(pixels, gates, coarser), gated + F.interpolate(as_images(coarser), scale_factor=2)
    )
    agree(launch.upsample_add(pixels, gates, None), gated)


@torch.inference_mode()
def test_maps_of_four_sizes_are_upsampled_and_concatenated() -> None:
    parts = [(draw(2, size, 2 * size, 24), torch.rand(2, 24, device=DEVICE)) for size in (1, 2, 4, 8)]
    theirs = [
        F.interpolate(as_images(pixels) * gates[:, :, None, None], scale_factor=8 // pixels.shape[1])
        for pixels, gates in parts
    ]
    agree(launch.upsample_concat(parts), torch.cat(theirs, dim=1))


@torch.inference_mode()
def test_the_deconvolution_head_makes_sixteen_probabilities_from_each_pixel() -> None:
    first, second = (
        nn.ConvTranspose2d(24, 24, 2, stride=2).to(DEVICE),
        nn.ConvTranspose2d(24, 1, 2, stride=2).to(DEVICE),
    )
    pixels = 3 * draw(2, 3, 5, 24)
    ours = launch.deconv_head(layers.DeconvHead.of(first, second), pixels)
    theirs = torch.sigmoid(second(F.relu(first(as_images(pixels)))))[:, 0]
    assert (ours - 255 * theirs).abs().max() < 1


@torch.inference_mode()
def test_the_argmax_of_the_softmax_and_its_probability() -> None:
    logits = 4 * draw(3, 2, 5000)
    classes, probabilities = launch.argmax_softmax(logits)
    theirs = logits.float().softmax(dim=-1).max(dim=-1)
    assert torch.equal(logits.gather(2, classes[..., None]), logits.max(dim=-1, keepdim=True).values)
    torch.testing.assert_close(probabilities, theirs.values, atol=1e-3, rtol=1e-2)


@torch.inference_mode()
def test_a_residual_connection_and_its_layer_norm() -> None:
    hidden, update, norm = draw(3, 5, 40), draw(3, 5, 40), nn.LayerNorm(40, eps=1e-5).to(DEVICE).half()
    norm.weight.copy_(draw(40))
    norm.bias.copy_(draw(40))
    total, normed = launch.add_layer_norm(hidden, update, norm)
    assert torch.equal(total, hidden + update)
    torch.testing.assert_close(normed, norm(hidden + update), atol=5e-3, rtol=5e-3)


@torch.inference_mode()
def test_bias_and_silu_after_a_convolution() -> None:
    values, bias = draw(2, 24, 5, 7).to(memory_format=torch.channels_last), draw(24)
    theirs = F.silu(values + bias[:, None, None])
    torch.testing.assert_close(launch.add_bias_silu(values, bias), theirs, atol=2e-3, rtol=2e-3)
