"""visiond watches folders and runs OCR, YOLO, CLIP and BLIP on every image, on all GPUs, without losing one.

Read `pipeline/coordinator.py` first: it is the life of an image, one method for each step.
"""

__version__ = "0.2.0.dev0"
