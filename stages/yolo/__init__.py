"""YOLO: the detector of objects."""
