"""Models of the catalog with random weights, in the sizes that their authors published.

Vocabularies are as large as theirs, but the tokenizers know only a few words: only the length of a text counts here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from stages.pretrained.language import do_without_num2words
from stages.yolo.library import build
from stages.yolo.weights import save_network
from tests.stages import captioners, checkpoints, readers
from tests.stages.yolo.detectors import read_structure

COCO_CLASSES = 80
BLIP_WORDS, GEMMA_WORDS = 30524, 256000
SIZES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
BASE, LARGE = SIZES["base"], SIZES["large"]
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def save(folder: Path, kind: str, config: Any, *parts: Any) -> None:
    """A model of a class of transformers in half precision, and its tokenizer, processor or both."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, kind)(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # some classes draw none
            parameter.data.normal_(std=0.02)
    model.save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)


def make_yolo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        structure = read_structure(f"{name}.yaml") | {"nc": COCO_CLASSES}
        names = [f"class {number}" for number in range(COCO_CLASSES)]
        config = {"model": structure, "nc": len(names), "names": names, "imgsz": 640}
        save_network(build(config).state_dict(), config, folder)

    return make


def make_detector(kind: str, processor: str, side: int, **settings: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        labels = {number: f"class {number}" for number in range(COCO_CLASSES)}
        config = getattr(transformers, f"{kind}Config")(id2label=labels, **settings)
        prepare = getattr(transformers, processor)(size={"height": side, "width": side}, do_pad=False)
        save(folder, f"{kind}ForObjectDetection", config, prepare)

    return make


def make_clip(
    side: int, patch: int, vision: dict[str, Any], text: dict[str, Any], dim: int
) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = transformers.CLIPConfig(
            vision_config={**vision, "image_size": side, "patch_size": patch},
            text_config={**text, **ENDS},
            projection_dim=dim,
        )
        prepare = transformers.CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}
        )
        save(folder, "CLIPModel", config, prepare, checkpoints.make_tokenizer(77))

    return make


def make_siglip(side: int, patch: int, tower: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        words = {"vocab_size": GEMMA_WORDS, "projection_size": tower["hidden_size"], **ENDS}
        config = transformers.SiglipConfig(
            vision_config={**tower, "image_size": side, "patch_size": patch}, text_config={**tower, **words}
        )
        prepare = transformers.SiglipImageProcessor(size={"height": side, "width": side}, resample=2)
        save(folder, "SiglipModel", config, prepare, checkpoints.make_tokenizer(64))

    return make


def make_blip(vision: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        text = {
            "vocab_size": BLIP_WORDS,
            "encoder_hidden_size": vision["hidden_size"],
            "sep_token_id": 2,
            **ENDS,
        }
        config = transformers.BlipConfig(vision_config={**vision, "image_size": 384}, text_config=text)
        processor = transformers.BlipProcessor(transformers.BlipImageProcessor(), captioners.make_tokenizer())
        save(folder, "BlipForConditionalGeneration", config, processor)

    return make


def make_blip2(folder: Path) -> None:
    processor = transformers.Blip2Processor(
        transformers.BlipImageProcessor(size={"height": 224, "width": 224}),
        captioners.make_tokenizer(),
        num_query_tokens=32,
    )
    opt = SIZES["blip2-text"] | ENDS
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.Blip2Config(text_config=opt, num_query_tokens=32, image_token_index=image)
    save(folder, "Blip2ForConditionalGeneration", config, processor)


def make_florence(folder: Path) -> None:
    tokenizer = captioners.make_tokenizer(image_token="<image>")
    text = SIZES["florence-text"] | ENDS
    config = transformers.Florence2Config(
        image_token_id=tokenizer.image_token_id,
        vision_config={"projection_dim": 768},
        text_config=text | {"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    )
    images = transformers.CLIPImageProcessor(
        size={"height": 768, "width": 768}, do_center_crop=False, image_seq_length=577
    )
    save(
        folder,
        "Florence2ForConditionalGeneration",
        config,
        transformers.Florence2Processor(images, tokenizer),
    )


def make_smolvlm(folder: Path) -> None:
    """SmolVLM2 500M: an image is up to 4 × 4 tiles of 512 pixels, and the whole."""
    do_without_num2words()
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    marks = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>", *places]
    tokenizer = captioners.make_tokenizer(["<image>", *marks])
    config = transformers.SmolVLMConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=4,
        text_config=SIZES["smolvlm-text"] | ENDS,
        vision_config={**BASE, "image_size": 512, "patch_size": 16},
    )
    images = transformers.SmolVLMImageProcessor(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    processor = transformers.SmolVLMProcessor(
        images,
        tokenizer,
        transformers.SmolVLMVideoProcessor(),
        image_seq_len=64,
        chat_template=captioners.SMOL_TEMPLATE,
    )
    save(folder, "SmolVLMForConditionalGeneration", config, processor)


def make_qwen(folder: Path) -> None:
    """Qwen3-VL 2B."""
    image, video, start, end = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
    tokenizer = captioners.make_tokenizer([image, video, start, end, "<|im_start|>", "<|im_end|>"])
    number = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen3VLConfig(
        image_token_id=number(image),
        video_token_id=number(video),
        vision_start_token_id=number(start),
        vision_end_token_id=number(end),
        text_config=SIZES["qwen-text"] | ENDS,
        vision_config=SIZES["qwen-vision"],
        tie_word_embeddings=True,
    )
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 2**16, "longest_edge": 2**24}
        ),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(patch_size=16),
        chat_template=captioners.QWEN_TEMPLATE.replace("IMAGE", start + image + end),
    )
    save(folder, "Qwen3VLForConditionalGeneration", config, processor)


def make_lighton(folder: Path) -> None:
    """LightOnOCR 1B, whose sizes are transformers' defaults; a page has at most 1540 pixels on its longer side."""
    named: Any = {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    }
    tokenizer = captioners.make_tokenizer(readers.MARKS, **named)
    config = transformers.LightOnOcrConfig(image_token_id=tokenizer.image_token_id)
    config.text_config.update(ENDS)
    images = transformers.PixtralImageProcessor(size={"longest_edge": 1540}, patch_size=14)
    processor = transformers.LightOnOcrProcessor(
        images,
        tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=readers.TEMPLATE.replace("IMAGE", "<|image_pad|>"),
    )
    save(folder, "LightOnOcrForConditionalGeneration", config, processor)


def make_rf_detr(folder: Path) -> None:
    backbone = transformers.RfDetrDinov2Config(**SIZES["rf-detr-backbone"])
    sizes = {"backbone_config": backbone, "decoder_layers": 3, "num_queries": 300}
    make_detector("RfDetr", "RfDetrImageProcessor", 512, **sizes)(folder)


def make_d_fine_nano(folder: Path) -> None:
    backbone = transformers.HGNetV2Config(**SIZES["d-fine-backbone"])
    make_detector("DFine", "RTDetrImageProcessor", 640, backbone_config=backbone, **SIZES["d-fine"])(folder)


# By stage and name in the catalog.
ARCHITECTURES: dict[str, dict[str, Callable[[Path], None]]] = {
    "yolo": {
        "yolov8n": make_yolo("yolov8n"),
        "yolo26m": make_yolo("yolo26m"),
        "rt-detrv2-r50": make_detector("RTDetrV2", "RTDetrImageProcessor", 640),
        "d-fine-nano": make_d_fine_nano,
        "d-fine-large": make_detector("DFine", "RTDetrImageProcessor", 640),
        "rf-detr-small": make_rf_detr,
    },
    "clip": {
        "clip-b32": make_clip(224, 32, BASE, SIZES["clip-text"], 512),
        "clip-l14": make_clip(224, 14, LARGE, BASE, 768),
        "siglip2-b16-224": make_siglip(224, 16, BASE),
        "siglip2-so400m-384": make_siglip(384, 16, SIZES["so400m"]),
    },
    "blip": {
        "blip-base": make_blip(BASE),
        "blip-large": make_blip(LARGE),
        "florence2-base": make_florence,
        "blip2-opt-2.7b": make_blip2,
        "smolvlm2-500m": make_smolvlm,
        "qwen3-vl-2b": make_qwen,
    },
    "ocr": {"lighton-ocr-1b": make_lighton},
}
