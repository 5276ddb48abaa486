"""The catalog's PP-OCR networks: sizes and languages. Imports no torch."""

from __future__ import annotations

from stages.weights.families import Family

PPOCR = "https://www.paddleocr.ai/v3.7.0/en/version3.x/module_usage/text_recognition.html"
LANGUAGES = "https://www.paddleocr.ai/main/en/version3.x/algorithm/PP-OCRv5/PP-OCRv5_multi_languages.html"
LINES = "PaddleOCR's own lines right {} %"
# License: https://huggingface.co/akunasoftware/PP-OCRv6-burn and https://github.com/PaddlePaddle/PaddleOCR (apache-2.0).
# Parameters of PP-OCRv6, of both networks: https://huggingface.co/PaddlePaddle/PP-OCRv6_medium_rec_onnx. Its small size
# is part of the rapidocr package.
# fmt: off
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
