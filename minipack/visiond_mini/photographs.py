"""Collects the photographs in Python packages, to measure what the mini pack says about them.

    pip download --no-deps --dest wheels scikit-image scikit-learn gradio imagecorruptions imgaug insightface mahotas \\
        pyiqa foolbox
    pip download --no-deps --only-binary :all: --python-version 3.10 --dest wheels scipy==1.9.3
    python -m visiond_mini.photographs wheels photographs
    python -m visiond_mini.score stages/mini --photographs photographs

It copies those of the installed packages and those in the wheels into the second folder, and prints their number for
each package. Drawings, and pictures that are nearly the same as another, are left out. Nothing is installed or run.
"""

from __future__ import annotations

import argparse
import bz2
import fnmatch
import pickle
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from stages.scenes.photographs import PHOTOGRAPHS, find_photographs

IN_WHEELS = {
    **{f"{package}/{folder}": names for (package, folder), names in PHOTOGRAPHS.items()},
    "gradio/*": ("cheetah.jpg", "images/cheetah1.jpg", "cheetah2.jpg", "lion.jpg", "tower.jpg", "groot.jpeg"),
    "imagecorruptions/frost": ("frost1.png", "frost2.png", "frost4.jpg", "frost5.jpg", "frost6.jpg"),
    "imgaug": ("quokka.jpg",),
    "insightface/data/images": ("Tom_Hanks_54745.png", "t1.jpg", "mask_*.jpg"),
    "mahotas/demos/data": ("lena.jpg", "luispedro.jpg", "nuclear.png"),
    "ResultsCalibra/ref_dir": ("*.bmp",),  # of pyiqa
    "tests/test_efficiency_img_dir": ("*.jpg",),  # of pyiqa
    "foolbox/data": ("imagenet_*.jpg",),
}
SCIPY = {"face": (768, 1024, 3), "ascent": (512, 512)}  # pixels in scipy/misc, until version 1.11


class Numbers(pickle.Unpickler):
    """Reads a pickle of numbers in lists, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"the pickle names {module}.{name}")


def collect_photographs(wheels: Path, folder: Path) -> Counter[str]:
    """Copy all photographs into the folder. Returns their number by package."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in find_photographs():
        package = next(package for package, _ in PHOTOGRAPHS if package in file.parts)
        shutil.copyfile(file, folder / f"{package}--{file.name}")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            unpack(archive, wheel.name.split("-")[0], folder)
    return Counter(path.name.split("--")[0] for path in folder.iterdir())


def unpack(archive: zipfile.ZipFile, package: str, folder: Path) -> None:
    patterns = [f"{place}/{name}" for place, names in IN_WHEELS.items() for name in names]
    for name in archive.namelist():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            owner = package if package == "pyiqa" else name.split("/")[0]  # as where it is installed
            (folder / f"{owner}--{Path(name).name}").write_bytes(archive.read(name))
    if package == "scipy":
        save_scipys(archive, folder)


def save_scipys(archive: zipfile.ZipFile, folder: Path) -> None:
    with archive.open("scipy/misc/face.dat") as file:
        face = np.frombuffer(bz2.decompress(file.read()), np.uint8).reshape(SCIPY["face"])
    with archive.open("scipy/misc/ascent.dat") as file:
        ascent = np.array(Numbers(file).load(), np.uint8).reshape(SCIPY["ascent"])
    for name, pixels in (("face", face), ("ascent", ascent)):
        Image.fromarray(pixels).save(folder / f"scipy--{name}.png")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    counts = collect_photographs(options.wheels, options.folder)
    for package, count in sorted(counts.items()):
        print(f"{count:4} {package}")
    print(f"{counts.total():4} photographs")


if __name__ == "__main__":
    main()
