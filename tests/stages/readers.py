"""Small page readers with random weights of the classes of transformers that the backend takes, saved as on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.stages.captioners import TEXT, VISION, make_captioner, make_tokenizer, save

MARKS = ["<|im_start|>", "<|im_end|>", "<|newline|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}"
    "{% else %}IMAGE{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def make_lighton(folder: Path) -> None:
    named: dict[str, Any] = {
        "image_token": "<|image_pad|>",
        "image_break_token": "<|vision_pad|>",
        "image_end_token": "<|vision_end|>",
    }
    tokenizer = make_tokenizer(MARKS, **named)
    config = transformers.LightOnOcrConfig(
        image_token_id=tokenizer.image_token_id,
        text_config={"model_type": "qwen3", "vocab_size": len(tokenizer), "head_dim": 8, **TEXT},
        vision_config={"model_type": "pixtral", "image_size": 64, "patch_size": 4, "head_dim": 8, **VISION},
        tie_word_embeddings=False,
    )
    images = transformers.PixtralImageProcessor(size={"longest_edge": 64}, patch_size=8)
    processor = transformers.LightOnOcrProcessor(
        images,
        tokenizer,
        patch_size=4,
        spatial_merge_size=2,
        chat_template=TEMPLATE.replace("IMAGE", "<|image_pad|>"),
    )
    save(folder, make_captioner("LightOnOcr", config), processor)


def make_published_lighton(folder: Path) -> None:
    """LightOnOCR as its authors publish it: other names in config.json and processor_config.json."""
    make_lighton(folder)
    change(
        folder / "config.json", model_type="mistral3", architectures=["LightOnOCRForConditionalGeneration"]
    )
    change(folder / "processor_config.json", processor_class="LightOnOCRProcessor")


def make_paddle(folder: Path) -> None:
    start, end = "<|IMAGE_START|>", "<|IMAGE_END|>"
    tokenizer = make_tokenizer(
        [*MARKS, start, end], image_token="<|IMAGE_PLACEHOLDER|>", video_token="<video>"
    )
    number = tokenizer.convert_tokens_to_ids
    config = transformers.PaddleOCRVLConfig(
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=number(start),
        vision_end_token_id=number(end),
        text_config={
            "vocab_size": len(tokenizer),
            "head_dim": 8,
            "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
            **TEXT,
        },
        vision_config={"image_size": 32, "patch_size": 4, **VISION},
        tie_word_embeddings=False,
    )
    images = transformers.PaddleOCRVLImageProcessor(
        size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40}, patch_size=4
    )
    template = TEMPLATE.replace("IMAGE", f"{start}<|IMAGE_PLACEHOLDER|>{end}")
    processor = transformers.PaddleOCRVLProcessor(images, tokenizer, chat_template=template)
    save(folder, make_captioner("PaddleOCRVL", config), processor)
    # Its authors' files also name code of the hub, which is not there, and which nothing may ask for.
    code = "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration"
    change(folder / "config.json", auto_map={"AutoModel": code, "AutoModelForCausalLM": code})
    change(
        folder / "processor_config.json",
        auto_map={"AutoProcessor": "processing_paddleocr_vl.PaddleOCRVLProcessor"},
    )


def make_glm(folder: Path) -> None:
    start, end = "<|begin_of_image|>", "<|end_of_image|>"
    films = ["<|begin_of_video|>", "<|end_of_video|>"]
    tokenizer = make_tokenizer([*MARKS, start, end, *films], image_token="<|image|>", video_token="<|video|>")
    number = tokenizer.convert_tokens_to_ids
    config = transformers.GlmOcrConfig(
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        image_start_token_id=number(start),
        image_end_token_id=number(end),
        video_start_token_id=number(films[0]),
        video_end_token_id=number(films[1]),
        text_config={
            "vocab_size": len(tokenizer),
            "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
            **TEXT,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "patch_size": 4,
        },
    )
    size = {"shortest_edge": 16 * 16 * 2, "longest_edge": 40 * 40 * 2}
    images = transformers.Glm46VImageProcessor(size=size, patch_size=4)
    processor = transformers.Glm46VProcessor(
        images,
        tokenizer,
        transformers.Glm46VVideoProcessor(patch_size=4),
        chat_template=TEMPLATE.replace("IMAGE", f"{start}<|image|>{end}"),
    )
    save(folder, make_captioner("GlmOcr", config), processor)


def make_deepseek(folder: Path) -> None:
    """It has 12 × 12 tokens for a tile and 16 × 16 for the whole image, so only its patches can be smaller."""
    tokenizer = make_tokenizer(MARKS, image_token="<image>")
    config = transformers.DeepseekOcr2Config(
        image_token_id=tokenizer.image_token_id,
        text_config={
            "vocab_size": len(tokenizer),
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_layer_types": ["dense", "sparse"],
            **TEXT,
        },
        vision_config={
            "sam_config": {
                **VISION,
                "hidden_size": 16,
                "output_channels": 16,
                "downsample_channels": [16, 32],
                "image_size": 128,
                "patch_size": 2,
                "window_size": 5,  # so that the attention is over few patches; it divides neither size
                "num_attention_heads": 2,
                "global_attn_indexes": [],
            },
            "encoder_config": {**VISION, "num_key_value_heads": 2},
        },
    )
    images = transformers.DeepseekOcr2ImageProcessor(
        size={"height": 128, "width": 128}, tile_size=96, max_patches=3
    )
    processor = transformers.DeepseekOcr2Processor(images, tokenizer, patch_size=2)
    save(folder, make_captioner("DeepseekOcr2", config), processor)


READERS: dict[str, Callable[[Path], None]] = {
    "lighton_ocr": make_lighton,
    "mistral3": make_published_lighton,
    "paddleocr_vl": make_paddle,
    "glm_ocr": make_glm,
    "deepseek_ocr2": make_deepseek,
}
