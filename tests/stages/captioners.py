"""Small captioners with random weights of the classes of transformers that backends take, saved as on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from stages.pretrained.language import do_without_num2words
from tests.stages.checkpoints import draw_weights, make_model

PAD, START, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
ASKED = "Describe this image in one sentence . a photo of User Assistant : What does the describe ?"
WORDS = [*ASKED.split(), *(f"w{number}" for number in range(40))]
# Any of these ends a caption, so that random weights end some early; Qwen's models also have several.
ENDS = [2, 17, 27, 29, 35, 38]
ENDS_OF = {"blip": [50], "blip-2": [11]}  # which have one, in their configuration
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}IMAGE{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    special: Sequence[str] = (), *, ends: bool = False, **named: str
) -> PreTrainedTokenizerFast:
    """Words that are separated by spaces. special: tokens that stand for an image, for example. ends: whether a
    text begins with the start token and ends with the end token, as BART's do. named: attributes of the tokenizer."""
    known = [PAD, START, END, UNKNOWN, *WORDS]
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(known)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        core.post_processor = processors.TemplateProcessing(
            single=f"{START} $A {END}", special_tokens=[(START, 1), (END, 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=named,
    )
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


def save(folder: Path, model: PreTrainedModel, processor: Any) -> None:
    """With weights that make captions which depend on the image, and of which some end early."""
    draw_weights(model)
    model.generation_config.update(eos_token_id=ENDS)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_captioner(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    return make_model(f"{name}ForConditionalGeneration", config)


def make_tiled(name: str) -> Callable[[Path], None]:
    """Idefics3 and SmolVLM: an image is up to four tiles, and the whole in the size of a tile."""

    def make(folder: Path) -> None:
        places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
        marks = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>", *places]
        tokenizer = make_tokenizer(["<image>", *marks])
        config = getattr(transformers, f"{name}Config")(
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT},
            vision_config={"image_size": 32, "patch_size": 8, **VISION},
        )
        images = getattr(transformers, f"{name}ImageProcessor")(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
        )
        videos = [transformers.SmolVLMVideoProcessor()] if name == "SmolVLM" else []
        do_without_num2words()
        kind = getattr(transformers, f"{name}Processor")
        processor = kind(images, tokenizer, *videos, image_seq_len=4, chat_template=SMOL_TEMPLATE)
        save(folder, make_captioner(name, config), processor)

    return make


def make_qwen(name: str, vision: dict[str, Any], rope: dict[str, Any]) -> Callable[[Path], None]:
    """Qwen's: an image has as many tokens as its size needs."""

    def make(folder: Path) -> None:
        image, video, start, end = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
        tokenizer = make_tokenizer([image, video, start, end, "<|im_start|>", "<|im_end|>"])
        number = tokenizer.convert_tokens_to_ids
        config = getattr(transformers, f"{name}Config")(
            image_token_id=number(image),
            video_token_id=number(video),
            vision_start_token_id=number(start),
            vision_end_token_id=number(end),
            text_config={
                "vocab_size": len(tokenizer),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope},
                **TEXT,
            },
            vision_config={"depth": 2, "num_heads": 2, "patch_size": 4, **vision},
        )
        size = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
        images = transformers.Qwen2VLImageProcessor(size=size, patch_size=4)
        videos = getattr(
            transformers, "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"
        )
        processor = getattr(transformers, f"{name}Processor")(
            images,
            tokenizer,
            videos(patch_size=4),
            chat_template=QWEN_TEMPLATE.replace("IMAGE", start + image + end),
        )
        save(folder, make_captioner(name, config), processor)

    return make


def make_internvl(folder: Path) -> None:
    named: dict[str, Any] = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = make_tokenizer(["<|im_start|>", "<|im_end|>"], **named)
    config = transformers.InternVLConfig(
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), **TEXT},
        vision_config={"image_size": [16, 16], "patch_size": [4, 4], **VISION},
    )
    images = transformers.GotOcr2ImageProcessor(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = transformers.InternVLProcessor(
        images,
        tokenizer,
        transformers.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=QWEN_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n"),
    )
    save(folder, make_captioner("InternVL", config), processor)


def make_llava(folder: Path) -> None:
    tokenizer = make_tokenizer(["<image>", "<video>", "<|im_start|>", "<|im_end|>"])
    grids = [[32, 32], [32, 64], [64, 32], [64, 64]]
    config = transformers.LlavaOnevisionConfig(
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grids,
        text_config={"model_type": "qwen2", "vocab_size": len(tokenizer), **TEXT},
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": 32,
            "patch_size": 8,
            "vision_use_head": False,
            **VISION,
        },
    )
    images = transformers.LlavaOnevisionImageProcessor(
        size={"height": 32, "width": 32}, image_grid_pinpoints=grids
    )
    processor = transformers.LlavaOnevisionProcessor(
        images,
        tokenizer,
        transformers.LlavaOnevisionVideoProcessor(size={"height": 32, "width": 32}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=QWEN_TEMPLATE.replace("IMAGE", "<image>"),
    )
    save(folder, make_captioner("LlavaOnevision", config), processor)


def make_florence(folder: Path) -> None:
    tokenizer = make_tokenizer(image_token="<image>")
    config = transformers.Florence2Config(
        image_token_id=tokenizer.image_token_id,
        vision_config={
            "embed_dim": [8, 16, 24, 32],
            "depths": [1] * 4,
            "num_heads": [1, 2, 2, 2],
            "num_groups": [1, 2, 2, 2],
            "window_size": 4,
            "projection_dim": 32,
        },
        text_config={
            "model_type": "bart",
            "vocab_size": len(tokenizer),
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": 2,
        },
    )
    images = transformers.CLIPImageProcessor(
        size={"height": 64, "width": 64}, do_center_crop=False, image_seq_length=5
    )
    model = make_captioner("Florence2", config)
    model.generation_config.update(num_beams=3, early_stopping=True, no_repeat_ngram_size=3)  # as published
    save(folder, model, transformers.Florence2Processor(images, tokenizer))


def make_blip(folder: Path) -> None:
    """As in BLIP large, the image's part is wider than the text's."""
    tokenizer = make_tokenizer()
    config = transformers.BlipConfig(
        vision_config={**VISION, "hidden_size": 48, "image_size": 32, "patch_size": 8},
        text_config={
            **VISION,
            "vocab_size": len(tokenizer),
            "encoder_hidden_size": 48,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "sep_token_id": 50,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        image_text_hidden_size=16,
    )
    images = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    save(folder, make_captioner("Blip", config), transformers.BlipProcessor(images, tokenizer))


def make_blip2(language: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        images = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
        processor = transformers.Blip2Processor(images, make_tokenizer(), num_query_tokens=4)
        tokenizer = processor.tokenizer  # now it has a token for images
        config = transformers.Blip2Config(
            vision_config={"image_size": 32, "patch_size": 8, **VISION},
            qformer_config={"vocab_size": 8, "cross_attention_frequency": 1, **VISION},
            text_config={"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 11, **language},
            num_query_tokens=4,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
        save(folder, make_captioner("Blip2", config), processor)

    return make


OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
}
T5 = {
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "bos_token_id": 1,
    "decoder_start_token_id": 0,
}
CAPTIONERS: dict[str, Callable[[Path], None]] = {
    "smolvlm": make_tiled("SmolVLM"),
    "idefics3": make_tiled("Idefics3"),
    "qwen3_vl": make_qwen(
        "Qwen3VL",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
    "qwen2_5_vl": make_qwen(
        "Qwen2_5_VL",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        {"mrope_section": [2, 1, 1]},
    ),
    "qwen2_vl": make_qwen(
        "Qwen2VL", {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}, {"mrope_section": [2, 1, 1]}
    ),
    "internvl": make_internvl,
    "llava_onevision": make_llava,
    "florence2": make_florence,
    "blip": make_blip,
    "blip-2": make_blip2(OPT),
}


def save_qwen_embedding(folder: Path) -> None:
    """Qwen3-VL-Embedding: a model that writes, but for a file that says how to make embeddings."""
    CAPTIONERS["qwen3_vl"](folder)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules))
