"""Recognizes the classifiers of transformers, and reads their labels. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from stages.contract.descriptor import Files, KnownModel
from stages.contract.manifest import PackError
from stages.contract.recognition import check_transformers, is_classifier, name_model, read_config
from stages.contract.timm import WRAPPER, read_classes

# By model_type: the start of the class's name, and what it is called.
FAMILIES = {
    "beit": ("Beit", "BEiT"),
    "bit": ("Bit", "BiT"),
    "clip": ("CLIP", "CLIP for classes"),
    "convnext": ("ConvNext", "ConvNeXt"),
    "convnextv2": ("ConvNextV2", "ConvNeXt V2"),
    "cvt": ("Cvt", "CvT"),
    "data2vec-vision": ("Data2VecVision", "Data2Vec"),
    "deit": ("DeiT", "DeiT"),
    "dinov2": ("Dinov2", "DINOv2"),
    "dinov2_with_registers": ("Dinov2WithRegisters", "DINOv2 with registers"),
    "efficientnet": ("EfficientNet", "EfficientNet"),
    "focalnet": ("FocalNet", "FocalNet"),
    "hgnet_v2": ("HGNetV2", "HGNetV2"),
    "hiera": ("Hiera", "Hiera"),
    "ijepa": ("IJepa", "I-JEPA"),
    "levit": ("Levit", "LeViT"),
    "metaclip_2": ("MetaClip2", "MetaCLIP 2 for classes"),
    "mobilenet_v1": ("MobileNetV1", "MobileNet V1"),
    "mobilenet_v2": ("MobileNetV2", "MobileNet V2"),
    "mobilevit": ("MobileViT", "MobileViT"),
    "mobilevitv2": ("MobileViTV2", "MobileViT V2"),
    "poolformer": ("PoolFormer", "PoolFormer"),
    "pvt_v2": ("PvtV2", "PVT V2"),
    "regnet": ("RegNet", "RegNet"),
    "resnet": ("ResNet", "ResNet"),
    "segformer": ("Segformer", "SegFormer"),
    "siglip": ("Siglip", "SigLIP for classes"),
    "swiftformer": ("SwiftFormer", "SwiftFormer"),
    "swin": ("Swin", "Swin"),
    "swinv2": ("Swinv2", "Swin V2"),
    "vit": ("ViT", "ViT"),
    "vit_msn": ("ViTMSN", "ViT MSN"),
}
DISTILLED = ("deit", "levit")  # whose classifiers may have a second head, of a teacher
CLASSIFIERS = (
    *(
        KnownModel(kind, f"{name}ForImageClassification{end}", title, parts=("image processor",))
        for kind, (name, title) in FAMILIES.items()
        for end in ("", "WithTeacher")
        if not end or kind in DISTILLED
    ),
    KnownModel(*WRAPPER, "a model of timm", parts=()),
)
UNNAMED = "LABEL_{}"  # as transformers calls a label without a name


def find(path: Path) -> dict[str, str]:
    """A folder whose config.json names a classifier, also one that `check` refuses."""
    for folder in ("classifier", "."):
        file = path / folder / "config.json"
        if file.is_file() and is_classifier(name_model(path / folder)[1]):
            return {"model": folder}
    return {}


def check(files: Files, *, allow_pickle: bool) -> None:
    folder = files["model"]
    kind, name = name_model(folder)
    if kind not in (*FAMILIES, WRAPPER[0]):
        titles = ", ".join(title for _, title in FAMILIES.values())
        raise PackError(
            f'{folder} holds a {name} (model_type "{kind}"), which visiond does not take. It takes classifiers of {titles}.'
        )
    check_transformers(CLASSIFIERS, folder)
    if not list_labels(folder):
        raise PackError(
            f"{folder} holds a model without classes (num_classes is 0). Take one that was trained for classes."
        )


def list_labels(folder: Path) -> list[str]:
    """The label of each of a classifier's numbers, by its config.json as transformers reads it. Labels without a name are
    LABEL_0, …; of several with one name, the later ones have their number behind it. Raises PackError."""
    file = folder / "config.json"
    config = read_config(file)
    found, count = config.get("id2label"), config.get("num_labels")
    if name_model(folder)[0] == WRAPPER[0]:
        count = config.get("num_classes", count)
        found = dict(enumerate(config.get("label_names") or read_classes(count)))
    try:
        named = {int(number): label for number, label in found.items()} if isinstance(found, dict) else {}
        count = len(named) if named else 2 if count is None else int(count)
    except (TypeError, ValueError) as error:
        raise PackError(
            f"{file} cannot be used: the labels in id2label must have numbers as keys."
        ) from error
    labels: dict[str, None] = {}
    for number in range(count):
        label = named.get(number)
        label = UNNAMED.format(number) if label in (None, "") else str(label)
        labels[f"{label} ({number})" if label in labels else label] = None
    return list(labels)
