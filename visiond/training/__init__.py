"""Training by Hugging Face Accelerate. Never imported by the daemon or its workers."""
