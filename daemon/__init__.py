"""visiond: every image of a drop folder through OCR, YOLO, CLIP and BLIP, on all the GPUs, and none lost.

Read `pipeline.py` first: it is the life of an image, a method a step.
"""

__version__ = "0.2.0.dev0"
