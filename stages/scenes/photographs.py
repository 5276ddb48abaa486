"""The photographs that installed packages carry."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# Photographs in packages, by the package and the folder in it.
PHOTOGRAPHS = {
    ("ultralytics", "assets"): ("bus.jpg", "zidane.jpg"),
    ("matplotlib", "mpl-data/sample_data"): ("grace_hopper.jpg",),
    ("sklearn", "datasets/images"): ("china.jpg", "flower.jpg"),
    ("skimage", "data"): (
        "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png",
        "coffee.png", "coins.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png",
        "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg", "text.png",
    ),
}  # fmt: skip


def find_photographs(folder: Path | None = None) -> list[Path]:
    """All files of a folder; without one, the photographs in packages that are installed."""
    if folder:
        return sorted(path for path in folder.iterdir() if path.is_file())
    found = []
    for (package, place), names in PHOTOGRAPHS.items():
        spec = importlib.util.find_spec(package)
        for root in getattr(spec, "submodule_search_locations", None) or []:
            found += [Path(root) / place / name for name in names]
    return [path for path in found if path.is_file()]
