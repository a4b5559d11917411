"""A decoder from a Hugging Face folder, with tree attention; LoRA."""
