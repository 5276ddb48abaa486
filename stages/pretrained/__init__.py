"""What stages share whose models are classes of transformers."""
