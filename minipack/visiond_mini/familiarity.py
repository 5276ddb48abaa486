"""Fits what tells the images of a pack's own kind from all others, as the last step of a training.

    python -m visiond_mini.familiarity PACK

Own images are synthetic scenes of a seed that no training and no score uses; the others are drawn by
minipack/visiond_mini/strange.py. No photograph is used. The classifier is a ridge logistic regression on the features of
stages/pretrained/familiarity.py. Its threshold is such that it refuses few scenes that it was not fitted on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from stages.contract.manifest import MANIFEST, digest_file, read_manifest, write_manifest
from stages.images.devices import pixels_of
from stages.images.images import read_batches
from stages.pretrained.familiarity import FILE, ROLES, Features
from stages.scenes.generator import write_samples
from stages.scenes.truth import TRUTH, read_truth
from visiond_mini.score import BATCH, find_device
from visiond_mini.strange import write_strange

SCENE_SEED, PICTURE_SEED = 51, 90_002
COUNT = 3000  # scenes, and half as many others
FITTED = 2 / 3  # of the scenes; the rest is for the threshold
REFUSED = 0.005  # of the scenes that the threshold is chosen with
PENALTY, STEPS = 1e-2, 25


def add_familiarity(
    pack: Path, workdir: Path, count: int = COUNT, say: Callable[[str], None] = print
) -> None:
    """Fit the classifier on `count` scenes and half as many other pictures, and add it to the pack for each stage."""
    own, others = workdir / f"scenes-{SCENE_SEED}-{count}", workdir / f"pictures-{PICTURE_SEED}-{count}"
    if not (own / TRUTH).is_file():
        write_samples(own, count, SCENE_SEED)
    scenes = [own / truth.file for truth in read_truth(own / TRUTH)]
    pictures = write_strange(others, count // 2, PICTURE_SEED)
    weight, bias = fit(read_features(pack, scenes), read_features(pack, pictures))
    add_classifier(pack, weight, bias)
    say(f"fitted what the pack knows on {count} scenes and {count // 2} other pictures")


def add_classifier(pack: Path, weight: Tensor, bias: Tensor) -> None:
    """Write the classifier, and name it in the entry of each stage. weight: [dim]. bias: []."""
    part = pack / f".{FILE}"
    save_file({"weight": weight.float(), "bias": bias.float()}, part)
    part.chmod(0o644)  # safetensors writes for the owner alone
    part.replace(pack / FILE)
    manifest = read_manifest(pack / MANIFEST)
    stages = {
        name: msgspec.structs.replace(entry, files=entry.files | ROLES)
        for name, entry in manifest.stages.items()
    }
    digests = dict(sorted((manifest.digests | {FILE: digest_file(pack / FILE)}).items()))
    write_manifest(pack / MANIFEST, msgspec.structs.replace(manifest, stages=stages, digests=digests))


def read_features(pack: Path, files: Sequence[Path]) -> Tensor:
    """The features of image files, [files, dim] in float64 on the host."""
    device = find_device()
    features = Features(str(pack / ROLES["familiarity_model"]), device)
    with torch.inference_mode():
        batches = [features(pixels_of(images)).cpu() for images in read_batches(files, BATCH, device)]
    return torch.cat(batches).double()


def fit(own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [dim] and bias [] of a classifier whose score is positive for the others. own, others: [images, dim]."""
    fitted = round(len(own) * FITTED)
    known = torch.cat((own[:fitted], others))
    mean, deviation = known.mean(dim=0), known.std(dim=0) + 1e-6
    answers = torch.cat((torch.zeros(fitted), torch.ones(len(others)))).double()
    weight = fit_logistic((known - mean) / deviation, answers)[:-1] / deviation
    scores = own[fitted:] @ weight
    return weight, -scores.quantile(1 - REFUSED)


def fit_logistic(inputs: Tensor, answers: Tensor) -> Tensor:
    """Weights and bias, [dim + 1], of a ridge logistic regression in which both answers, 0 and 1, have the same
    share, by Newton's method."""
    inputs = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)
    penalty = torch.full((inputs.shape[1],), PENALTY, dtype=inputs.dtype)
    penalty[-1] = 1e-6
    shares = torch.where(answers > 0, 0.5 / answers.sum(), 0.5 / (1 - answers).sum())
    weights = inputs.new_zeros(inputs.shape[1])
    for _ in range(STEPS):
        likely = (inputs @ weights).sigmoid()
        slope = inputs.T @ (shares * (likely - answers)) + penalty * weights
        bend = shares * (likely * (1 - likely)).clamp_min(1e-4)
        weights = weights - torch.linalg.solve((inputs.T * bend) @ inputs + penalty.diag(), slope)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--workdir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        add_familiarity(options.pack, options.workdir or Path(folder), options.count)


if __name__ == "__main__":
    main()
