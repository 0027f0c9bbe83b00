"""Text to ids and back: vocabularies, chat templates, incremental text, stop strings. Torch-free, imports nothing heavy."""
