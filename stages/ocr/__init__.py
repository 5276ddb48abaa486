"""OCR: PP-OCRv6, its two networks, and their fast versions for GPUs."""
