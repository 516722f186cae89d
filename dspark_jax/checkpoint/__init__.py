"""Reading, writing and converting checkpoints: Hugging Face, DeepSpec, GGUF and the package's own Orbax form."""
