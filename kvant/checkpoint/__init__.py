"""From files to weights: GGUF and safetensors, mapped and checked; names and conventions; the store of models."""
