"""The models that visiond knows by a short name: where each is published, under which license, and how good it is.

Every figure and license is from the entry's source; a field is empty if no source was found. A name is offered
only if a backend of this installation takes the model. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stages.contract.base import Provenance
from stages.contract.manifest import Manifest, StageEntry
from stages.registry import registry

INCLUDED_NAME, INCLUDED_LICENSE = "PP-OCRv6 small", "Apache-2.0"  # OCR, which comes with the program
ULTRALYTICS = "ultralytics"  # instead of a model_type: a .pt file of this library


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A published model.

    name: for the configuration and `visiond models pull`. type: its model_type, or the catalog's ULTRALYTICS.
    parameters: their number. quality: what was measured, and the value. source: of license, parameters and quality.
    file: of the repository, if it has several models. detector: the repository of the text detector that is pulled
    together with a text recognizer.
    """

    name: str
    stage: str
    family: str
    type: str
    repository: str
    license: str = ""
    parameters: int | None = None
    quality: str = ""
    source: str = ""
    file: str = ""
    detector: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of a family have in common.
    rows: of each model its name, its repository or file, millions of parameters, and the figure for `measure`."""

    stage: str
    name: str
    type: str
    license: str
    measure: str
    source: str
    rows: tuple[tuple[str, str, float | None, float | None], ...]
    repository: str = ""  # if all models are files of one
    detector: str = ""  # as of PublishedModel

    def entries(self) -> Iterator[PublishedModel]:
        for name, place, millions, figure in self.rows:
            yield PublishedModel(
                name,
                self.stage,
                self.name,
                self.type,
                self.repository or place,
                self.license,
                None if millions is None else round(millions * 1_000_000),
                "" if figure is None else self.measure.format(figure),
                self.source,
                place if self.repository else "",
                self.detector,
            )


# The quality of a family, as its source calls it.
COCO = "COCO AP {}"  # detection on val2017, mean over IoU 0.50 to 0.95
IMAGENET = "ImageNet zero-shot {} %"
CVQA = "CVQA-LOCAL zero-shot {} %"
CIDER = "COCO CIDEr {}"

# A family in each call, a model in each row.
# fmt: off
DETECTORS = (
    # License: https://huggingface.co/Ultralytics/YOLO11 and https://huggingface.co/Ultralytics/YOLO26 (agpl-3.0), and
    # for YOLOv8 the library's.
    Family("yolo", "YOLOv8", ULTRALYTICS, "AGPL-3.0", COCO, "https://docs.ultralytics.com/models/yolov8", (
        ("yolov8n", "yolov8n.pt", 3.2, 37.3),
        ("yolov8s", "yolov8s.pt", 11.2, 44.9),
        ("yolov8m", "yolov8m.pt", 25.9, 50.2),
        ("yolov8l", "yolov8l.pt", 43.7, 52.9),
        ("yolov8x", "yolov8x.pt", 68.2, 53.9),
    ), "Ultralytics/YOLOv8"),
    Family("yolo", "YOLO11", ULTRALYTICS, "AGPL-3.0", COCO, "https://docs.ultralytics.com/models/yolo11", (
        ("yolo11n", "yolo11n.pt", 2.6, 39.5),
        ("yolo11s", "yolo11s.pt", 9.4, 47.0),
        ("yolo11m", "yolo11m.pt", 20.1, 51.5),
        ("yolo11l", "yolo11l.pt", 25.3, 53.4),
        ("yolo11x", "yolo11x.pt", 56.9, 54.7),
    ), "Ultralytics/YOLO11"),
    # AP of the end-to-end head, which runs by default.
    Family("yolo", "YOLO26", ULTRALYTICS, "AGPL-3.0", COCO, "https://docs.ultralytics.com/tasks/detect", (
        ("yolo26n", "yolo26n.pt", 2.4, 40.1),
        ("yolo26s", "yolo26s.pt", 9.5, 47.8),
        ("yolo26m", "yolo26m.pt", 20.4, 52.5),
        ("yolo26l", "yolo26l.pt", 24.8, 54.4),
        ("yolo26x", "yolo26x.pt", 55.7, 56.9),
    ), "Ultralytics/YOLO26"),
    Family("yolo", "RF-DETR", "rf_detr", "Apache-2.0", COCO, "https://rfdetr.roboflow.com/latest/learn/run/detection", (
        ("rf-detr-nano", "Roboflow/rf-detr-nano", 30.5, 48.4),
        ("rf-detr-small", "Roboflow/rf-detr-small", 32.1, 53.0),
        ("rf-detr-medium", "Roboflow/rf-detr-medium", 33.7, 54.7),
        ("rf-detr-large", "Roboflow/rf-detr-large", 33.9, 56.5),
    )),
    # License: https://huggingface.co/ustc-community (apache-2.0).
    Family("yolo", "D-FINE", "d_fine", "Apache-2.0", COCO, "https://github.com/Peterande/D-FINE", (
        ("d-fine-nano", "ustc-community/dfine-nano-coco", 4, 42.8),
        ("d-fine-small", "ustc-community/dfine-small-coco", 10, 48.5),
        ("d-fine-medium", "ustc-community/dfine-medium-coco", 19, 52.3),
        ("d-fine-large", "ustc-community/dfine-large-coco", 31, 54.0),
        ("d-fine-xlarge", "ustc-community/dfine-xlarge-coco", 62, 55.8),
        ("d-fine-small-o365", "ustc-community/dfine-small-obj2coco", 10, 50.7),
        ("d-fine-medium-o365", "ustc-community/dfine-medium-obj2coco", 19, 55.1),
        ("d-fine-xlarge-o365", "ustc-community/dfine-xlarge-obj2coco", 62, 59.3),
    )),
    # The authors' own repositories are not in the format of transformers; its documentation names these. Their license
    # was not found: the authors' code is Apache-2.0, and the backbone of S is distilled from DINOv3.
    Family("yolo", "DEIMv2", "deimv2", "", COCO, "https://github.com/Intellindust-AI-Lab/DEIMv2", (
        ("deimv2-n", "harshaljanjani/DEIMv2_HGNetv2_N_COCO_Transformers", 3.6, 43.0),
        ("deimv2-s", "harshaljanjani/DEIMv2_DINOv3_S_COCO_Transformers", 9.7, 50.9),
    )),
    # License: https://huggingface.co/PekingU/rtdetr_v2_r18vd (apache-2.0).
    Family("yolo", "RT-DETRv2", "rt_detr_v2", "Apache-2.0", COCO,
           "https://github.com/lyuwenyu/RT-DETR/tree/main/rtdetrv2_pytorch", (
        ("rt-detrv2-r18", "PekingU/rtdetr_v2_r18vd", 20, 47.9),
        ("rt-detrv2-r34", "PekingU/rtdetr_v2_r34vd", 31, 49.9),
        ("rt-detrv2-r50", "PekingU/rtdetr_v2_r50vd", 42, 53.4),
        ("rt-detrv2-r101", "PekingU/rtdetr_v2_r101vd", 76, 54.3),
    )),
)
OPEN_CLIP = "https://github.com/mlfoundations/open_clip/blob/main/docs/openclip_results.csv"
TOWERS = (
    # License: https://github.com/openai/CLIP.
    Family("clip", "CLIP", "clip", "MIT", IMAGENET, OPEN_CLIP, (
        ("clip-b32", "openai/clip-vit-base-patch32", 151.3, 63.3),
        ("clip-b16", "openai/clip-vit-base-patch16", 149.6, 68.3),
        ("clip-l14", "openai/clip-vit-large-patch14", 427.6, 75.5),
        ("clip-l14-336", "openai/clip-vit-large-patch14-336", 427.9, 76.6),
    )),
    # License: https://huggingface.co/google/siglip-base-patch16-224 (apache-2.0).
    Family("clip", "SigLIP", "siglip", "Apache-2.0", IMAGENET, OPEN_CLIP, (
        ("siglip-b16-224", "google/siglip-base-patch16-224", 203.2, 76.0),
        ("siglip-b16-256", "google/siglip-base-patch16-256", 203.2, 76.5),
        ("siglip-b16-384", "google/siglip-base-patch16-384", 203.5, 78.5),
        ("siglip-b16-512", "google/siglip-base-patch16-512", 203.8, 79.1),
        ("siglip-l16-256", "google/siglip-large-patch16-256", 652.2, 80.5),
        ("siglip-l16-384", "google/siglip-large-patch16-384", 652.5, 82.1),
        ("siglip-so400m-224", "google/siglip-so400m-patch14-224", 877.4, 82.0),
        ("siglip-so400m-384", "google/siglip-so400m-patch14-384", 878.0, 83.1),
    )),
)
SIGLIP2 = "https://github.com/google-research/big_vision/blob/main/big_vision/configs/proj/image_text/README_siglip2.md"
MULTILINGUAL = (
    # License: https://huggingface.co/google/siglip2-so400m-patch14-384 (apache-2.0). The source has the parameters of
    # the image half only.
    Family("clip", "SigLIP 2", "siglip", "Apache-2.0", IMAGENET, SIGLIP2, (
        ("siglip2-b32-256", "google/siglip2-base-patch32-256", None, 74.0),
        ("siglip2-b16-224", "google/siglip2-base-patch16-224", None, 78.2),
        ("siglip2-b16-256", "google/siglip2-base-patch16-256", None, 79.1),
        ("siglip2-b16-384", "google/siglip2-base-patch16-384", None, 80.6),
        ("siglip2-b16-512", "google/siglip2-base-patch16-512", None, 81.2),
        ("siglip2-l16-256", "google/siglip2-large-patch16-256", None, 82.5),
        ("siglip2-l16-384", "google/siglip2-large-patch16-384", None, 83.1),
        ("siglip2-l16-512", "google/siglip2-large-patch16-512", None, 83.5),
        ("siglip2-so400m-256", "google/siglip2-so400m-patch16-256", None, 83.4),
        ("siglip2-so400m-384", "google/siglip2-so400m-patch16-384", None, 84.1),
        ("siglip2-so400m-512", "google/siglip2-so400m-patch16-512", None, 84.3),
        ("siglip2-giant-256", "google/siglip2-giant-opt-patch16-256", None, 84.5),
        ("siglip2-giant-384", "google/siglip2-giant-opt-patch16-384", None, 85.0),
    )),
    Family("clip", "SigLIP 2 NaFlex", "siglip2", "Apache-2.0", IMAGENET, SIGLIP2, (
        ("siglip2-b16-naflex", "google/siglip2-base-patch16-naflex", None, 78.5),
        ("siglip2-so400m-naflex", "google/siglip2-so400m-patch16-naflex", None, 83.5),
    )),
    # Parameters, rounded: https://huggingface.co/collections/merve/metaclip2-multilingual.
    Family("clip", "MetaCLIP 2", "metaclip_2", "CC-BY-NC-4.0", CVQA, "https://github.com/facebookresearch/MetaCLIP", (
        ("metaclip2-s16", "facebook/metaclip-2-worldwide-s16", 400, 46.9),
        ("metaclip2-m16", "facebook/metaclip-2-worldwide-m16", 500, 49.3),
        ("metaclip2-b32", "facebook/metaclip-2-worldwide-b32", 600, 49.1),
        ("metaclip2-b16", "facebook/metaclip-2-worldwide-b16", 600, 50.9),
        ("metaclip2-l14", "facebook/metaclip-2-worldwide-l14", 1000, 56.5),
        ("metaclip2-huge", "facebook/metaclip-2-worldwide-huge-quickgelu", None, 57.4),
    )),
)
CAPTIONERS = (
    # License: https://huggingface.co/Salesforce/blip-image-captioning-large (bsd-3-clause). Published scores are of the
    # paper's checkpoints, and no source says that these are the same.
    Family("blip", "BLIP", "blip", "BSD-3-Clause", CIDER, "https://huggingface.co/Salesforce/blip-image-captioning-large", (
        ("blip-base", "Salesforce/blip-image-captioning-base", None, None),
        ("blip-large", "Salesforce/blip-image-captioning-large", None, None),
    )),
    Family("blip", "BLIP-2", "blip-2", "MIT", CIDER, "https://huggingface.co/Salesforce/blip2-opt-2.7b-coco", (
        ("blip2-opt-2.7b", "Salesforce/blip2-opt-2.7b", None, None),
        ("blip2-opt-2.7b-coco", "Salesforce/blip2-opt-2.7b-coco", None, None),
    )),
    # Microsoft's own repositories need code from the hub; the documentation of transformers names these.
    Family("blip", "Florence-2", "florence2", "MIT", CIDER, "https://huggingface.co/microsoft/Florence-2-large-ft", (
        ("florence2-base", "florence-community/Florence-2-base", 230, None),
        ("florence2-large", "florence-community/Florence-2-large", 770, None),
    )),
    # Parameters: as their names say.
    Family("blip", "SmolVLM2", "smolvlm", "Apache-2.0", "", "https://huggingface.co/HuggingFaceTB/SmolVLM2-2.2B-Instruct", (
        ("smolvlm2-256m", "HuggingFaceTB/SmolVLM2-256M-Video-Instruct", 256, None),
        ("smolvlm2-500m", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 500, None),
        ("smolvlm2-2.2b", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2200, None),
    )),
    Family("blip", "Qwen3-VL", "qwen3_vl", "Apache-2.0", "", "https://github.com/QwenLM/Qwen3-VL", (
        ("qwen3-vl-2b", "Qwen/Qwen3-VL-2B-Instruct", 2000, None),
    )),
)
# Published scores are left out: most are of a pipeline that cuts a page into parts before the model reads them, which
# visiond does not do.
READERS = (
    # config.json: https://github.com/sgl-project/sglang/pull/17806 (model_type mistral3). Parameters: as their names say.
    Family("ocr", "LightOnOCR", "mistral3", "Apache-2.0", "", "https://huggingface.co/lightonai/LightOnOCR-2-1B", (
        ("lighton-ocr-2-1b", "lightonai/LightOnOCR-2-1B", 1000, None),
        ("lighton-ocr-1b", "lightonai/LightOnOCR-1B-1025", 1000, None),
    )),
    # License: https://huggingface.co/zai-org/GLM-OCR (mit).
    Family("ocr", "GLM-OCR", "glm_ocr", "MIT", "", "https://huggingface.co/docs/transformers/model_doc/glm_ocr", (
        ("glm-ocr", "zai-org/GLM-OCR", 900, None),
    )),
    # License: https://huggingface.co/PaddlePaddle/PaddleOCR-VL (apache-2.0).
    Family("ocr", "PaddleOCR-VL", "paddleocr_vl", "Apache-2.0", "",
           "https://huggingface.co/docs/transformers/model_doc/paddleocr_vl", (
        ("paddleocr-vl", "PaddlePaddle/PaddleOCR-VL", 900, None),
    )),
    # The authors' own repository needs code from the hub, and the documentation of transformers names this one. License
    # and parameters: of the authors' weights (https://huggingface.co/deepseek-ai/DeepSeek-OCR-2, apache-2.0, 3B).
    Family("ocr", "DeepSeek-OCR 2", "deepseek_ocr2", "Apache-2.0", "",
           "https://huggingface.co/docs/transformers/model_doc/deepseek_ocr2", (
        ("deepseek-ocr2", "deepseek-community/DeepSeek-OCR-2", 3000, None),
    )),
)
PPOCR = "https://www.paddleocr.ai/v3.7.0/en/version3.x/module_usage/text_recognition.html"
LANGUAGES = "https://www.paddleocr.ai/main/en/version3.x/algorithm/PP-OCRv5/PP-OCRv5_multi_languages.html"
LINES = "PaddleOCR's own lines right {} %"
# PP-OCR's networks. License: https://huggingface.co/akunasoftware/PP-OCRv6-burn and
# https://github.com/PaddlePaddle/PaddleOCR (apache-2.0). Parameters of PP-OCRv6, of both networks:
# https://huggingface.co/PaddlePaddle/PP-OCRv6_medium_rec_onnx. Its small size is part of the rapidocr package.
RECOGNIZERS = (
    Family("ocr", "PP-OCRv6", "pp_ocrv6_tiny_rec", "Apache-2.0", LINES, PPOCR, (
        ("pp-ocrv6-tiny", "PaddlePaddle/PP-OCRv6_tiny_rec_safetensors", 1.5, None),
    ), detector="PaddlePaddle/PP-OCRv6_tiny_det_safetensors"),
    # Its recognizer has the model_type of the small one: https://huggingface.co/mikoy92/PP-OCRv6-medium-rec-mlx.
    Family("ocr", "PP-OCRv6", "pp_ocrv6_small_rec", "Apache-2.0", LINES, PPOCR, (
        ("pp-ocrv6-medium", "PaddlePaddle/PP-OCRv6_medium_rec_safetensors", 34.5, 83.2),
    ), detector="PaddlePaddle/PP-OCRv6_medium_det_safetensors"),
    Family("ocr", "PP-OCRv5", "pp_ocrv5_server_rec", "Apache-2.0", LINES, PPOCR, (
        ("pp-ocrv5-server", "PaddlePaddle/PP-OCRv5_server_rec_safetensors", None, None),
    ), detector="PaddlePaddle/PP-OCRv5_server_det_safetensors"),
    Family("ocr", "PP-OCRv5", "pp_ocrv5_mobile_rec", "Apache-2.0", LINES, PPOCR, (
        ("pp-ocrv5-mobile", "PaddlePaddle/PP-OCRv5_mobile_rec_safetensors", None, None),
    ), detector="PaddlePaddle/PP-OCRv5_mobile_det_safetensors"),
    # Recognizers alone: PP-OCRv6 small's detector finds the lines of all these scripts.
    Family("ocr", "PP-OCRv5 languages", "pp_ocrv5_mobile_rec", "Apache-2.0", LINES, LANGUAGES, tuple(
        (f"pp-ocrv5-{name}", f"PaddlePaddle/{place}_PP-OCRv5_mobile_rec_safetensors", None, None)
        for name, place in (
            ("arabic", "arabic"), ("cyrillic", "cyrillic"), ("devanagari", "devanagari"), ("english", "en"),
            ("eslav", "eslav"), ("greek", "el"), ("korean", "korean"), ("latin", "latin"), ("tamil", "ta"),
            ("telugu", "te"), ("thai", "th"),
        )
    )),
)
# fmt: on
CATALOG = {
    entry.name: entry
    for family in (*DETECTORS, *TOWERS, *MULTILINGUAL, *CAPTIONERS, *READERS, *RECOGNIZERS)
    for entry in family.entries()
}


def find_backend(entry: PublishedModel) -> str | None:
    """The name of the backend of this installation that takes the model."""
    backends = registry.STAGES[entry.stage].backends if entry.stage in registry.STAGES else {}
    for name, backend in backends.items():
        if name == entry.type == ULTRALYTICS or any(model.type == entry.type for model in backend.models):
            return name
    return None


def offered() -> dict[str, PublishedModel]:
    """The models that this installation can run, by name."""
    return {name: entry for name, entry in CATALOG.items() if find_backend(entry)}


def list_published(stage: str, repositories: Iterable[str]) -> list[PublishedModel]:
    """The entries of a stage that are published in these repositories."""
    wanted = {repository.lower() for repository in repositories}
    return [e for e in CATALOG.values() if e.stage == stage and e.repository.lower() in wanted]


def describe_source(manifest: Manifest, stage: str, entry: StageEntry) -> Provenance:
    """What is known of a stage's weights. Those without files come with a library or, like fakes, are none. A pack of several
    repositories has them from one that the catalog knows for this stage; which model of it, it does not say if there are
    several."""
    if stage == "ocr" and registry.find_backend(stage, entry.backend).includes(entry.files):
        return Provenance(name=INCLUDED_NAME, license=INCLUDED_LICENSE)
    if not entry.files:
        return Provenance(name=entry.backend)
    published = list_published(stage, manifest.revision)
    repositories = {each.repository for each in published} or set(manifest.revision)
    repository = repositories.pop() if len(repositories) == 1 else ""
    commit = manifest.revision.get(repository, "")
    if not published or len(manifest.stages) == 1:
        return Provenance(name=manifest.name, repository=repository, commit=commit, license=manifest.license)
    name = published[0].name if len(published) == 1 else repository
    return Provenance(name=name, repository=repository, commit=commit, license=published[0].license)


def find_published(repository: str, file: str = "") -> PublishedModel | None:
    """The entry of a repository, whatever the case of its letters: the hub ignores that too."""
    wanted = (repository.lower(), file)
    return next((e for e in CATALOG.values() if (e.repository.lower(), e.file) == wanted), None)
