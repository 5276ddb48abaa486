"""OCR: PP-OCRv6, its networks, and the kernels that speed them up."""
